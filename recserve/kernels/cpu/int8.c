/* s (x Q^T) + b for 8-bit integers Q in panels, with a scale s for each output, for any number of
 * rows.
 *
 * A panel is PANEL rows of Q in the order in which they are read: each step along the sum has one
 * byte of every row. Integers become floats in registers, or once for many rows of x. bfloat16 x
 * becomes floats once per call. All sums are floats. Bytes moved: Q once for up to BLOCK_ROWS rows.
 * Operations: 2 n m per row and 2 n m conversions per six rows. The order of a sum does not depend
 * on the number of rows.
 */
#include "panels.h"
#include <stdlib.h>

#ifdef __SSE4_1__
#include <immintrin.h>
#endif

#define BLOCK_ROWS 96 /* rows that share one pass over a panel */
#define MANY_ROWS 24  /* from so many rows on, a span of weights becomes floats once */
#define SPAN 128      /* steps that are summed before they are added to the total */

/* GCC 12 converts bytes with its vector extensions one by one. */
INLINE floats load_int8(const int8_t *at) {
#if defined __AVX512F__
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((void *)at)));
#elif defined __AVX2__
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((void *)at)));
#elif defined __SSE4_1__ && LANES == 4
    int32_t four;
    memcpy(&four, at, sizeof four);
    return (floats)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
#else
    floats x;
    for (int i = 0; i < LANES; i++) x[i] = at[i];
    return x;
#endif
}

/* Adds the products of `count` rows of x with `width` vectors of a panel, over `span` steps. wide:
 * whether the weights are floats. totals: rows of PANEL floats. */
INLINE void strip(int wide, int count, int width, const float *x, int64_t stride,
                  const char *weights, int64_t span, float *totals) {
    floats sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < span; k++) {
        floats w[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < width; v++) {
            int64_t at = k * PANEL + v * LANES;
            w[v] = wide ? load(FLOAT32, weights, at) : load_int8((const int8_t *)weights + at);
        }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++)
#pragma GCC unroll 16
            for (int v = 0; v < width; v++) sums[r][v] += x[r * stride + k] * w[v];
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < width; v++) {
            int64_t at = r * PANEL + v * LANES;
            store(FLOAT32, totals, at, load(FLOAT32, totals, at) + sums[r][v]);
        }
}

INLINE void tile(int wide, int count, const float *x, int64_t stride, const char *weights,
                 int64_t span, float *totals) {
    int width = strip_width(count);
    for (int v = 0; v < VECTORS; v += width)
        strip(wide, count, width, x, stride, weights + v * LANES * (wide ? 4 : 1), span,
              totals + v * LANES);
}

INLINE void tiles(int wide, int64_t rows, const float *x, int64_t stride, const char *weights,
                  int64_t span, float *totals) {
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * stride, totals += ROWS * PANEL)
        tile(wide, ROWS, x, stride, weights, span, totals);
    switch (rows) {
    case 5: tile(wide, 5, x, stride, weights, span, totals); break;
    case 4: tile(wide, 4, x, stride, weights, span, totals); break;
    case 3: tile(wide, 3, x, stride, weights, span, totals); break;
    case 2: tile(wide, 2, x, stride, weights, span, totals); break;
    case 1: tile(wide, 1, x, stride, weights, span, totals); break;
    }
}

/* Multiplies up to BLOCK_ROWS rows of x by one panel and stores `left` of its columns. */
INLINE void block(int type, const float *x, const int8_t *panel, const float *scales,
                  const float *bias, char *out, int64_t rows, int64_t steps, int64_t size,
                  int64_t left) {
    float totals[BLOCK_ROWS * PANEL], weights[SPAN * PANEL];
    memset(totals, 0, rows * PANEL * sizeof *totals);
    for (int64_t k = 0; k < steps; k += SPAN, panel += SPAN * PANEL) {
        int64_t span = k + SPAN < steps ? SPAN : steps - k;
        if (rows < MANY_ROWS) {
            tiles(0, rows, x + k, steps, (const char *)panel, span, totals);
            continue;
        }
        for (int64_t i = 0; i < span * PANEL; i += LANES)
            store(FLOAT32, weights, i, load_int8(panel + i));
        tiles(1, rows, x + k, steps, (const char *)weights, span, totals);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < left && i < PANEL; i += LANES) {
            floats scaled = load(FLOAT32, totals, r * PANEL + i) * load(FLOAT32, scales, i);
            store_some(type, out, r * size + i, scaled + load(FLOAT32, bias, i), left - i);
        }
}

/* x: [rows, steps]. panels: [ceil(size / PANEL), steps, PANEL]. scales, bias: [ceil(size / PANEL) *
 * PANEL] float32. out: [rows, size]. */
void linear_int8(int type, const char *x, const int8_t *panels, const float *scales,
                 const float *bias, char *out, int64_t rows, int64_t steps, int64_t size) {
    int64_t count = (size + PANEL - 1) / PANEL, bytes = type == FLOAT32 ? 4 : 2;
    int64_t most = rows < BLOCK_ROWS ? rows : BLOCK_ROWS;
    float *wide = type == FLOAT32 ? NULL : malloc(most * steps * sizeof *wide);
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
        int64_t some = r + BLOCK_ROWS < rows ? BLOCK_ROWS : rows - r;
        const float *from = type == FLOAT32 ? (const float *)x + r * steps : wide;
        for (int64_t i = 0; type != FLOAT32 && i < some * steps; i += LANES)
            store_some(FLOAT32, wide, i, load_some(BFLOAT16, x, r * steps + i, some * steps - i),
                       some * steps - i);
#pragma omp parallel for schedule(static) if (rows * steps * size >= MANY)
        for (int64_t i = 0; i < count; i++) {
            int64_t first = i * PANEL;
            const int8_t *panel = panels + first * steps;
            char *to = out + (r * size + first) * bytes;
            if (type == FLOAT32)
                block(FLOAT32, from, panel, scales + first, bias + first, to, some, steps, size,
                      size - first);
            else
                block(BFLOAT16, from, panel, scales + first, bias + first, to, some, steps, size,
                      size - first);
        }
    }
    free(wide);
}
