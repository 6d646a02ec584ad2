/* s (x Q^T) + b for 8-bit integers Q in panels, with a scale s for each output, for any number of
 * rows.
 *
 * A panel is PANEL rows of Q in the order in which they are read. Each step along the sum has
 * `depth` bytes of every row: two for bfloat16 x where the processor multiplies pairs of bfloat16,
 * else one. Integers become floats or pairs in registers. If a block has more than one tile of ROWS
 * rows, the first leaves them in the nearest cache for the others, and each prefetches its share of
 * the weights that come next. Other bfloat16 x becomes floats once per call. All sums are floats.
 * Bytes moved: Q once for up to BLOCK_ROWS rows. Operations: 2 n m per row, and n m conversions per
 * block. The order of a sum does not depend on the number of rows.
 */
#include "panels.h"
#include <stdlib.h>

#define BLOCK_ROWS 96 /* rows that share one pass over a panel */
#define SPAN 128      /* steps that are summed before they are added to the total */

/* Returns a float, or two bfloat16, of LANES outputs. The integers are exact in both types. */
INLINE words convert(int depth, const int8_t *at) {
#ifdef DOT_BF16
    if (depth == 2) return to_bf16(load_int8(at), load_int8(at + LANES));
#endif
    return (words)load_int8(at);
}

/* Adds the products of a step to a sum. x is one float, or two bfloat16, for all lanes. */
INLINE floats step(int depth, floats sum, uint32_t x, words w) {
    words xs = x - (words){};
#ifdef DOT_BF16
    if (depth == 2) return dot_bf16(sum, xs, w);
#endif
    return mul_add((floats)xs, (floats)w, sum);
}

/* Where a tile has its weights from. The first of several tiles stores what it converts. */
enum { CONVERT, CONVERT_AND_STORE, CONVERTED };

/* Some steps of a panel, which all rows of a block are multiplied by before the next. */
typedef struct {
    const int8_t *panel; /* [steps, PANEL, depth] */
    uint32_t *converted; /* [steps, PANEL]: the same after conversion */
    int64_t steps;
    const int8_t *next; /* where the tile prefetches: its share of the next span */
    int64_t rate;       /* bytes of `next` per step */
} Span;

/* Adds the products of `count` rows of x with `width` vectors of a span, from vector `first` on.
 * ahead: whether to prefetch. stride: steps of a row of x. totals: rows of PANEL floats. */
INLINE void strip(int depth, int source, int count, int first, int width, int ahead,
                  const uint32_t *x, int64_t stride, const Span *span, float *totals) {
    floats sums[ROWS][VECTORS] = {};
    int group = count < width ? 1 : width; /* vectors of weights that registers hold */
    int lines = source == CONVERT ? PANEL * depth / 64 : 1;
    for (int64_t k = 0; k < span->steps; k++) {
        for (int line = 0; ahead && line < lines; line++)
            __builtin_prefetch(span->next + k * span->rate + 64 * line);
        UNROLL(16)
        for (int v = 0; v < width; v += group) {
            words w[VECTORS];
            UNROLL(16)
            for (int g = 0; g < group; g++) {
                int64_t at = k * PANEL + (first + v + g) * LANES;
                if (source == CONVERTED)
                    memcpy(&w[g], span->converted + at, sizeof w[g]);
                else
                    w[g] = convert(depth, span->panel + depth * at);
                if (source == CONVERT_AND_STORE)
                    memcpy(span->converted + at, &w[g], sizeof w[g]);
            }
            UNROLL(6)
            for (int r = 0; r < count; r++)
                UNROLL(16)
                for (int g = 0; g < group; g++)
                    sums[r][v + g] = step(depth, sums[r][v + g], x[r * stride + k], w[g]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < width; v++) {
            int64_t at = r * PANEL + (first + v) * LANES;
            store(FLOAT32, totals, at, load(FLOAT32, totals, at) + sums[r][v]);
        }
}

INLINE void tile(int depth, int source, int count, const uint32_t *x, int64_t stride,
                 const Span *span, float *totals) {
    int width = strip_width(count);
    strip(depth, source, count, 0, width, 1, x, stride, span, totals);
    for (int v = width; v < VECTORS; v += width)
        strip(depth, source, count, v, width, 0, x, stride, span, totals);
}

/* Multiplies fewer than ROWS rows. */
INLINE void last_tile(int depth, int source, int64_t rows, const uint32_t *x, int64_t stride,
                      const Span *span, float *totals) {
    switch (rows) {
    case 5: tile(depth, source, 5, x, stride, span, totals); break;
    case 4: tile(depth, source, 4, x, stride, span, totals); break;
    case 3: tile(depth, source, 3, x, stride, span, totals); break;
    case 2: tile(depth, source, 2, x, stride, span, totals); break;
    case 1: tile(depth, source, 1, x, stride, span, totals); break;
    }
}

/* Multiplies the rows of a block by a span. */
INLINE void tiles(int depth, int64_t rows, const uint32_t *x, int64_t stride, Span *span,
                  float *totals) {
    if (rows < ROWS) return last_tile(depth, CONVERT, rows, x, stride, span, totals);
    if (rows == ROWS) return tile(depth, CONVERT, ROWS, x, stride, span, totals);
    tile(depth, CONVERT_AND_STORE, ROWS, x, stride, span, totals);
    for (rows -= ROWS; rows > 0; rows -= ROWS) {
        x += ROWS * stride, totals += ROWS * PANEL, span->next += span->steps * span->rate;
        if (rows >= ROWS)
            tile(depth, CONVERTED, ROWS, x, stride, span, totals);
        else
            last_tile(depth, CONVERTED, rows, x, stride, span, totals);
    }
}

/* Multiplies up to BLOCK_ROWS rows of x by one panel and stores `left` of its columns. */
INLINE void block(int type, int depth, const uint32_t *x, const int8_t *panel, const float *scales,
                  const float *bias, char *out, int64_t rows, int64_t steps, int64_t size,
                  int64_t left) {
    float totals[BLOCK_ROWS * PANEL];
    uint32_t converted[SPAN * PANEL];
    int64_t bytes = PANEL * depth, share = (rows + ROWS - 1) / ROWS;
    memset(totals, 0, rows * PANEL * sizeof *totals);
    for (int64_t k = 0; k < steps; k += SPAN, panel += SPAN * bytes) {
        int64_t some = k + SPAN < steps ? SPAN : steps - k;
        Span span = {panel, converted, some, panel + some * bytes, (bytes + share - 1) / share};
        tiles(depth, rows, x + k, steps, &span, totals);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < left && i < PANEL; i += LANES) {
            floats scaled = mul_add(load(FLOAT32, totals, r * PANEL + i), load(FLOAT32, scales, i),
                                    load(FLOAT32, bias, i));
            store_some(type, out, r * size + i, scaled, left - i);
        }
}

/* Returns how many bytes of an output follow each other in panels for x of this type and width. */
int int8_depth(int type, int64_t inner) {
#ifdef DOT_BF16
    if (type == BFLOAT16 && inner % 2 == 0) return 2;
#endif
    return 1;
}

void linear_int8(int type, const Product *weights, const char *x, char *out, int64_t rows) {
    const int8_t *panels = (const int8_t *)weights->panels;
    const float *scales = weights->scales, *bias = weights->bias;
    int64_t inner = weights->inner, size = weights->size;
    int64_t count = (size + PANEL - 1) / PANEL, bytes = type == FLOAT32 ? 4 : 2;
    int64_t depth = int8_depth(type, inner), steps = inner / depth;
    int64_t most = rows < BLOCK_ROWS ? rows : BLOCK_ROWS;
    int widens = type != FLOAT32 && depth == 1;
    float *wide = widens ? malloc(most * inner * sizeof *wide) : NULL;
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
        int64_t some = r + BLOCK_ROWS < rows ? BLOCK_ROWS : rows - r;
        if (widens) widen(x + r * inner * bytes, wide, some * inner);
        const void *from = widens ? (const void *)wide : x + r * inner * bytes;
        PARALLEL_FOR(schedule(static) if (rows * inner * size >= MANY))
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
#ifdef DOT_BF16
            else
                block(BFLOAT16, 2, from, panel, scales + first, bias + first, to, some, steps, size,
                      left);
#endif
        }
    }
    free(wide);
}
