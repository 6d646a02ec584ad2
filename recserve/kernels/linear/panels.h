/* Sizes of weights in panels, and of the tiles that multiply them. */
#pragma once
#include "functions.h"

#define PANEL 64
#define VECTORS (PANEL / LANES)
#define ROWS 6
#define SUMS (REGISTERS / 4 * 3) /* vectors that a tile sums; the rest hold x and weights */
#define MANY (1 << 18) /* threads share products with at least so many multiply-adds */

/* Returns how many vectors of a panel are multiplied at a time, so that the sums of `count` rows
 * fit the registers. */
INLINE int strip_width(int count) {
    int width = VECTORS;
    while (width * count > SUMS) width /= 2;
    return width;
}

void linear_int8(int type, const Product *weights, const char *x, char *out, int64_t rows);

/* Writes `count` bfloat16 numbers as floats. */
INLINE void widen(const char *x, float *to, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store_some(FLOAT32, to, i, load_some(BFLOAT16, x, i, count - i), count - i);
}
