/* s (x Q^T) + b for 8-bit integers Q in panels, with a scale s for each output, for any number of
 * rows.
 *
 * A panel is PANEL rows of Q in the order in which they are read. Each step along the sum has
 * `depth` bytes of every row: two for bfloat16 x where the processor multiplies pairs of bfloat16,
 * else one. Integers become floats or pairs in registers, or once for many rows of x. Other bfloat16
 * x becomes floats once per call. All sums are floats. Bytes moved: Q once for up to BLOCK_ROWS
 * rows. Operations: 2 n m per row and 2 n m conversions per six rows. The order of a sum does not
 * depend on the number of rows.
 */
#include "panels.h"
#include <stdlib.h>

#ifdef __SSE4_1__
#include <immintrin.h>
#endif

#define BLOCK_ROWS 96 /* rows that share one pass over a panel */
#define MANY_ROWS 24  /* from so many rows on, a span of weights is converted once */
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

/* Returns a float, or two bfloat16, of LANES outputs. The integers are exact in both types. */
INLINE words convert(int depth, const int8_t *at) {
#ifdef __AVX512BF16__
    if (depth == 2)
        return (words)_mm512_cvtne2ps_pbh((__m512)load_int8(at + LANES), (__m512)load_int8(at));
#endif
    return (words)load_int8(at);
}

/* Adds the products of a step to a sum. x is one float, or two bfloat16, for all lanes. */
INLINE floats step(int depth, floats sum, uint32_t x, words w) {
    words xs = x - (words){};
#ifdef __AVX512BF16__
    if (depth == 2) return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)xs, (__m512bh)w);
#endif
    return sum + (floats)xs * (floats)w;
}

/* Adds the products of `count` rows of x with `width` vectors of a panel, over `span` steps. wide:
 * whether the weights are converted. stride: steps of a row of x. totals: rows of PANEL floats. */
INLINE void strip(int depth, int wide, int count, int width, const uint32_t *x, int64_t stride,
                  const char *weights, int64_t span, float *totals) {
    floats sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < span; k++) {
        words w[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < width; v++) {
            int64_t at = k * PANEL + v * LANES;
            if (wide)
                memcpy(&w[v], weights + 4 * at, sizeof w[v]);
            else
                w[v] = convert(depth, (const int8_t *)weights + depth * at);
        }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++)
#pragma GCC unroll 16
            for (int v = 0; v < width; v++)
                sums[r][v] = step(depth, sums[r][v], x[r * stride + k], w[v]);
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < width; v++) {
            int64_t at = r * PANEL + v * LANES;
            store(FLOAT32, totals, at, load(FLOAT32, totals, at) + sums[r][v]);
        }
}

INLINE void tile(int depth, int wide, int count, const uint32_t *x, int64_t stride,
                 const char *weights, int64_t span, float *totals) {
    int width = strip_width(count);
    for (int v = 0; v < VECTORS; v += width)
        strip(depth, wide, count, width, x, stride, weights + v * LANES * (wide ? 4 : depth), span,
              totals + v * LANES);
}

INLINE void tiles(int depth, int wide, int64_t rows, const uint32_t *x, int64_t stride,
                  const char *weights, int64_t span, float *totals) {
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * stride, totals += ROWS * PANEL)
        tile(depth, wide, ROWS, x, stride, weights, span, totals);
    switch (rows) {
    case 5: tile(depth, wide, 5, x, stride, weights, span, totals); break;
    case 4: tile(depth, wide, 4, x, stride, weights, span, totals); break;
    case 3: tile(depth, wide, 3, x, stride, weights, span, totals); break;
    case 2: tile(depth, wide, 2, x, stride, weights, span, totals); break;
    case 1: tile(depth, wide, 1, x, stride, weights, span, totals); break;
    }
}

/* Multiplies up to BLOCK_ROWS rows of x by one panel and stores `left` of its columns. */
INLINE void block(int type, int depth, const uint32_t *x, const int8_t *panel, const float *scales,
                  const float *bias, char *out, int64_t rows, int64_t steps, int64_t size,
                  int64_t left) {
    float totals[BLOCK_ROWS * PANEL];
    uint32_t weights[SPAN * PANEL];
    memset(totals, 0, rows * PANEL * sizeof *totals);
    for (int64_t k = 0; k < steps; k += SPAN, panel += SPAN * PANEL * depth) {
        int64_t span = k + SPAN < steps ? SPAN : steps - k;
        if (rows < MANY_ROWS) {
            tiles(depth, 0, rows, x + k, steps, (const char *)panel, span, totals);
            continue;
        }
        for (int64_t i = 0; i < span * PANEL; i += LANES) {
            words converted = convert(depth, panel + depth * i);
            memcpy(weights + i, &converted, sizeof converted);
        }
        tiles(depth, 1, rows, x + k, steps, (const char *)weights, span, totals);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < left && i < PANEL; i += LANES) {
            floats scaled = load(FLOAT32, totals, r * PANEL + i) * load(FLOAT32, scales, i);
            store_some(type, out, r * size + i, scaled + load(FLOAT32, bias, i), left - i);
        }
}

/* Returns how many bytes of an output follow each other in panels for x of this type and width. */
int int8_depth(int type, int64_t inner) {
#ifdef __AVX512BF16__
    if (type == BFLOAT16 && inner % 2 == 0) return 2;
#endif
    return 1;
}

/* x: [rows, inner]. panels: [ceil(size / PANEL), inner / depth, PANEL, depth]. scales, bias:
 * [ceil(size / PANEL) * PANEL] float32. out: [rows, size]. */
void linear_int8(int type, const char *x, const int8_t *panels, const float *scales,
                 const float *bias, char *out, int64_t rows, int64_t inner, int64_t size) {
    int64_t count = (size + PANEL - 1) / PANEL, bytes = type == FLOAT32 ? 4 : 2;
    int64_t depth = int8_depth(type, inner), steps = inner / depth;
    int64_t most = rows < BLOCK_ROWS ? rows : BLOCK_ROWS;
    int widens = type != FLOAT32 && depth == 1;
    float *wide = widens ? malloc(most * inner * sizeof *wide) : NULL;
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
        int64_t some = r + BLOCK_ROWS < rows ? BLOCK_ROWS : rows - r, all = some * inner;
        for (int64_t i = 0; widens && i < all; i += LANES)
            store_some(FLOAT32, wide, i, load_some(BFLOAT16, x, r * inner + i, all - i), all - i);
        const void *from = widens ? (const void *)wide : x + r * inner * bytes;
#pragma omp parallel for schedule(static) if (rows * inner * size >= MANY)
        for (int64_t i = 0; i < count; i++) {
            int64_t first = i * PANEL, left = size - first;
            const int8_t *panel = panels + first * inner;
            char *to = out + (r * size + first) * bytes;
            if (type == FLOAT32)
                block(FLOAT32, 1, from, panel, scales + first, bias + first, to, some, steps, size,
                      left);
            else if (depth == 1)
                block(BFLOAT16, 1, from, panel, scales + first, bias + first, to, some, steps, size,
                      left);
#ifdef __AVX512BF16__
            else
                block(BFLOAT16, 2, from, panel, scales + first, bias + first, to, some, steps, size,
                      left);
#endif
        }
    }
    free(wide);
}
