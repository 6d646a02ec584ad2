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
 * with float32 weights.
 */
#include "panels.h"
#include <stdlib.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#define AHEAD 16 /* steps from a prefetch to its use */
#define SPAN 256 /* steps that are summed before they are added to the total */
#define MANY_ROWS 24 /* from so many rows on, a panel of float16 becomes float32 once */

/* Loads float16 numbers, which must be finite. */
INLINE floats load_halves(const char *at) {
#if defined __AVX512F__
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
#elif defined __F16C__
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
#else
    halves x;
    memcpy(&x, at, sizeof x);
    words bits = __builtin_convertvector(x, words);
    floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponents differ by 112 */
    return (floats)((words)size | (bits & 0x8000) << 16);
#endif
}

/* Adds the products of a step to a sum. x is one float, or two bfloat16, for all lanes. */
INLINE floats step(int type, floats sum, uint32_t x, const char *weights) {
    words w;
    memcpy(&w, weights, sizeof w);
    words xs = x - (words){};
    if (type == FLOAT32) return sum + (floats)xs * (floats)w;
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)xs, (__m512bh)w);
#else
    sum += (floats)(xs << 16) * (floats)(w << 16);
    return sum + (floats)(xs & 0xffff0000u) * (floats)(w & 0xffff0000u);
#endif
}

/* Adds the products of `count` rows of x with `width` vectors of a panel, over `span` steps. each:
 * bytes of a step of one output, 2 for float16 and else 4. ahead: whether to prefetch, for all strips
 * of the tile. totals: rows of VECTORS vectors. */
INLINE void strip(int type, int each, int count, int width, int ahead, const char *x,
                  const char *panel, floats *totals, int64_t steps, int64_t span) {
    floats sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < span; k++, panel += each * PANEL) {
        for (int line = 0; ahead && line < each * PANEL; line += 64)
            __builtin_prefetch(panel + AHEAD * each * PANEL + line);
        floats wide[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; each == 2 && v < width; v++) wide[v] = load_halves(panel + v * 2 * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            uint32_t element;
            memcpy(&element, x + (r * steps + k) * 4, sizeof element);
#pragma GCC unroll 16
            for (int v = 0; v < width; v++)
                sums[r][v] = step(type, sums[r][v], element,
                                  each == 2 ? (const char *)&wide[v] : panel + v * 4 * LANES);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < width; v++) totals[r * VECTORS + v] += sums[r][v];
}

/* Multiplies `count` rows of x by one panel and stores `left` of its columns. */
INLINE void tile(int type, int each, int count, const char *x, const char *panel,
                 const float *bias, char *out, int64_t steps, int64_t size, int64_t left) {
    int width = strip_width(count);
    floats totals[ROWS * VECTORS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) totals[r * VECTORS + v] = load(FLOAT32, bias, v * LANES);
    for (int64_t k = 0; k < steps; k += SPAN, panel += SPAN * each * PANEL) {
        int64_t span = k + SPAN < steps ? SPAN : steps - k;
        strip(type, each, count, width, 1, x + 4 * k, panel, totals, steps, span);
        for (int v = width; v < VECTORS; v += width)
            strip(type, each, count, width, 0, x + 4 * k, panel + v * each * LANES, totals + v,
                  steps, span);
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS && v * LANES < left; v++)
            store_some(type, out, r * size + v * LANES, totals[r * VECTORS + v], left - v * LANES);
}

INLINE void rows_by_panel(int type, int each, const char *x, const char *panel, const float *bias,
                          char *out, int64_t rows, int64_t steps, int64_t size, int64_t left) {
    int64_t in = 4 * steps, over = (type == FLOAT32 ? 4 : 2) * size;
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * in, out += ROWS * over)
        tile(type, each, ROWS, x, panel, bias, out, steps, size, left);
    switch (rows) {
    case 5: tile(type, each, 5, x, panel, bias, out, steps, size, left); break;
    case 4: tile(type, each, 4, x, panel, bias, out, steps, size, left); break;
    case 3: tile(type, each, 3, x, panel, bias, out, steps, size, left); break;
    case 2: tile(type, each, 2, x, panel, bias, out, steps, size, left); break;
    case 1: tile(type, each, 1, x, panel, bias, out, steps, size, left); break;
    }
}

/* x: [rows, steps (x 2)]. panels: [ceil(size / PANEL), steps, PANEL (x 2)]. bias: [ceil(size /
 * PANEL) * PANEL] float32. out: [rows, size]. */
void linear(int type, const char *x, const char *panels, const float *bias, char *out, int64_t rows,
            int64_t steps, int64_t size) {
    int64_t count = (size + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (rows * steps * size >= MANY)
    for (int64_t i = 0; i < count; i++) {
        const char *panel = panels + i * steps * 4 * PANEL;
        int64_t first = i * PANEL;
        if (type == FLOAT32)
            rows_by_panel(FLOAT32, 4, x, panel, bias + first, out + 4 * first, rows, steps, size,
                          size - first);
        else
            rows_by_panel(BFLOAT16, 4, x, panel, bias + first, out + 2 * first, rows, steps, size,
                          size - first);
    }
}

/* x: [rows, steps] float32. panels: [ceil(size / PANEL), steps, PANEL] float16. bias: [ceil(size /
 * PANEL) * PANEL] float32. out: [rows, size] float32. */
void linear_halves(const char *x, const char *panels, const float *bias, char *out, int64_t rows,
                   int64_t steps, int64_t size) {
    int64_t count = (size + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (rows * steps * size >= MANY)
    for (int64_t i = 0; i < count; i++) {
        const char *panel = panels + i * steps * 2 * PANEL;
        int64_t first = i * PANEL;
        char *wide = rows < MANY_ROWS ? NULL : malloc(steps * 4 * PANEL);
        if (!wide) {
            rows_by_panel(FLOAT32, 2, x, panel, bias + first, out + 4 * first, rows, steps, size,
                          size - first);
            continue;
        }
        for (int64_t k = 0; k < steps * PANEL; k += LANES)
            store(FLOAT32, wide, k, load_halves(panel + 2 * k));
        rows_by_panel(FLOAT32, 4, x, wide, bias + first, out + 4 * first, rows, steps, size,
                      size - first);
        free(wide);
    }
}

/* x: [rows, m]. out: [rows, weights->size]. */
void apply_product(int type, const Product *weights, const char *x, char *out, int64_t rows) {
    const Product *w = weights;
    if (w->halves)
        linear_halves(x, w->panels, w->bias, out, rows, w->steps, w->size);
    else if (w->scales)
        linear_int8(type, x, (const int8_t *)w->panels, w->scales, w->bias, out, rows, w->steps,
                    w->size);
    else
        linear(type, x, w->panels, w->bias, out, rows, w->steps, w->size);
}
