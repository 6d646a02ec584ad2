/* x W^T + b for weights in panels, for any number of rows.
 *
 * A panel is PANEL rows of W in the order in which they are read. Each step along the sum has one
 * element (float32) or two (bfloat16) of every row of the panel. A tile of up to six rows of x
 * keeps its sums in registers while a panel streams by. Bytes moved: W once for up to six rows, and
 * once more from the nearest caches for every further six. Operations: 2 n m per row. The order of
 * a sum does not depend on the number of rows.
 *
 * Weights that are float16 numbers can be multiplied with float32 rows. They are half as many bytes
 * and become float32 in registers, or once for many rows. The sums have the bits that they have
 * with float32 weights. bfloat16 numbers become float32 once for many rows too, where the processor
 * has no instruction for pairs of them. The bits are those of few rows.
 */
#include "panels.h"
#include <stdlib.h>

#define AHEAD 16 /* steps from a prefetch to its use */
#define SPAN 256 /* steps that are summed before they are added to the total */
#define MANY_ROWS 24 /* from so many rows on, a panel of 16-bit weights becomes float32 once */

/* What a step of an output multiplies: a float; two bfloat16; a float and a float16; or half of two
 * bfloat16, both of them floats by now. */
enum { FLOATS, PAIRS, HALVES, WIDE_PAIRS };

INLINE int bytes_of(int form) { return form == HALVES ? 2 : 4; }
INLINE int type_of(int form) { return form == PAIRS || form == WIDE_PAIRS ? BFLOAT16 : FLOAT32; }
INLINE int64_t span_of(int form) { return form == WIDE_PAIRS ? 2 * SPAN : SPAN; }

/* Adds the products of a step to a sum. x is one float, or two bfloat16, for all lanes. */
INLINE floats step(int form, floats sum, uint32_t x, const char *weights) {
    words w;
    memcpy(&w, weights, sizeof w);
    words xs = x - (words){};
    if (form != PAIRS) return mul_add((floats)xs, (floats)w, sum);
#ifdef DOT_BF16
    return dot_bf16(sum, xs, w);
#else
    sum = mul_add((floats)(xs << 16), (floats)(w << 16), sum);
    return mul_add((floats)(xs & 0xffff0000u), (floats)(w & 0xffff0000u), sum);
#endif
}

/* Adds the products of `count` rows of x with `width` vectors of a panel, over `span` steps. ahead:
 * whether to prefetch for all strips of the tile. The processor foresees the reads of a tile with
 * one strip, where a prefetch takes 6 % of a row's time. totals: rows of VECTORS vectors. */
INLINE void strip(int form, int count, int width, int ahead, const char *x, const char *panel,
                  floats *totals, int64_t steps, int64_t span) {
    int each = bytes_of(form);
    floats sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < span; k++, panel += each * PANEL) {
        for (int line = 0; ahead && line < each * PANEL; line += 64)
            __builtin_prefetch(panel + AHEAD * each * PANEL + line);
        floats wide[VECTORS];
        UNROLL(16)
        for (int v = 0; form == HALVES && v < width; v++)
            wide[v] = load_float16(panel + v * 2 * LANES);
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            uint32_t element;
            memcpy(&element, x + (r * steps + k) * 4, sizeof element);
            UNROLL(16)
            for (int v = 0; v < width; v++)
                sums[r][v] = step(form, sums[r][v], element,
                                  form == HALVES ? (const char *)&wide[v] : panel + v * 4 * LANES);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < width; v++) totals[r * VECTORS + v] += sums[r][v];
}

/* Multiplies `count` rows of x by one panel and stores `left` of its columns. */
INLINE void tile(int form, int count, const char *x, const char *panel, const float *bias,
                 char *out, int64_t steps, int64_t size, int64_t left) {
    int width = strip_width(count), each = bytes_of(form);
    int64_t most = span_of(form);
    floats totals[ROWS * VECTORS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) totals[r * VECTORS + v] = load(FLOAT32, bias, v * LANES);
    for (int64_t k = 0; k < steps; k += most, panel += most * each * PANEL) {
        int64_t span = k + most < steps ? most : steps - k;
        strip(form, count, width, width < VECTORS, x + 4 * k, panel, totals, steps, span);
        for (int v = width; v < VECTORS; v += width)
            strip(form, count, width, 0, x + 4 * k, panel + v * each * LANES, totals + v,
                  steps, span);
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS && v * LANES < left; v++)
            store_some(type_of(form), out, r * size + v * LANES, totals[r * VECTORS + v],
                       left - v * LANES);
}

INLINE void rows_by_panel(int form, const char *x, const char *panel, const float *bias, char *out,
                          int64_t rows, int64_t steps, int64_t size, int64_t left) {
    int64_t in = 4 * steps, over = (type_of(form) == FLOAT32 ? 4 : 2) * size;
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * in, out += ROWS * over)
        tile(form, ROWS, x, panel, bias, out, steps, size, left);
    switch (rows) {
    case 5: tile(form, 5, x, panel, bias, out, steps, size, left); break;
    case 4: tile(form, 4, x, panel, bias, out, steps, size, left); break;
    case 3: tile(form, 3, x, panel, bias, out, steps, size, left); break;
    case 2: tile(form, 2, x, panel, bias, out, steps, size, left); break;
    case 1: tile(form, 1, x, panel, bias, out, steps, size, left); break;
    }
}

/* Writes a panel of pairs as a panel of floats with twice as many steps. */
INLINE void widen_panel(const char *panel, float *to, int64_t steps) {
    for (int64_t k = 0; k < steps; k++, to += 2 * PANEL)
        for (int64_t i = 0; i < PANEL; i += LANES) {
            words pairs;
            memcpy(&pairs, panel + 4 * (k * PANEL + i), sizeof pairs);
            store(FLOAT32, to, i, (floats)(pairs << 16));
            store(FLOAT32, to, PANEL + i, (floats)(pairs & 0xffff0000u));
        }
}

static void linear_own_type(int type, const Product *weights, const char *x, char *out,
                            int64_t rows) {
    const char *panels = weights->panels;
    const float *bias = weights->bias;
    int64_t steps = type == FLOAT32 ? weights->inner : weights->inner / 2;
    int64_t size = weights->size, count = (size + PANEL - 1) / PANEL;
    float *wide = NULL;
#ifndef DOT_BF16
    if (type == BFLOAT16 && rows >= MANY_ROWS) wide = malloc(rows * steps * 2 * sizeof *wide);
    if (wide) widen(x, wide, rows * steps * 2);
#endif
    PARALLEL_FOR(schedule(static) if (rows * steps * size >= MANY))
    for (int64_t i = 0; i < count; i++) {
        const char *panel = panels + i * steps * 4 * PANEL;
        int64_t first = i * PANEL, left = size - first;
        float *widened = wide ? malloc(steps * 2 * PANEL * sizeof *wide) : NULL;
        if (type == FLOAT32) {
            rows_by_panel(FLOATS, x, panel, bias + first, out + 4 * first, rows, steps, size, left);
        } else if (widened) {
            widen_panel(panel, widened, steps);
            rows_by_panel(WIDE_PAIRS, (const char *)wide, (const char *)widened, bias + first,
                          out + 2 * first, rows, 2 * steps, size, left);
        } else {
            rows_by_panel(PAIRS, x, panel, bias + first, out + 2 * first, rows, steps, size, left);
        }
        free(widened);
    }
    free(wide);
}

static void linear_float16(const Product *weights, const char *x, char *out, int64_t rows) {
    const char *panels = weights->panels;
    const float *bias = weights->bias;
    int64_t steps = weights->inner, size = weights->size, count = (size + PANEL - 1) / PANEL;
    PARALLEL_FOR(schedule(static) if (rows * steps * size >= MANY))
    for (int64_t i = 0; i < count; i++) {
        const char *panel = panels + i * steps * 2 * PANEL;
        int64_t first = i * PANEL;
        char *wide = rows < MANY_ROWS ? NULL : malloc(steps * 4 * PANEL);
        if (!wide) {
            rows_by_panel(HALVES, x, panel, bias + first, out + 4 * first, rows, steps, size,
                          size - first);
            continue;
        }
        for (int64_t k = 0; k < steps * PANEL; k += LANES)
            store(FLOAT32, wide, k, load_float16(panel + 2 * k));
        rows_by_panel(FLOATS, x, wide, bias + first, out + 4 * first, rows, steps, size,
                      size - first);
        free(wide);
    }
}

/* x: [rows, m]. out: [rows, weights->size]. */
void linear(int type, const Product *weights, const char *x, char *out, int64_t rows) {
    switch (weights->stored) {
    case OWN_TYPE: linear_own_type(type, weights, x, out, rows); break;
    case FLOAT16: linear_float16(weights, x, out, rows); break;
    case INT8: linear_int8(type, weights, x, out, rows); break;
    }
}
