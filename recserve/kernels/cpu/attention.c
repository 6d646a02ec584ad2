/* Softmax tree attention of few rows over root and tree as one list of keys, block after block.
 *
 * Per tree and KV head: R rows (nodes times query heads of the group), m keys, D dimensions. A
 * block of keys is read once for all rows, turned so that a vector holds sixteen keys of one
 * dimension: 2 R m D multiply-adds, 2 m D elements read. Softmax is taken as in FlashAttention
 * (arXiv 2205.14135).
 */
#include "functions.h"

#define BLOCK 64 /* keys whose scores are held at a time */

/* Sixteen vectors as the columns of what were their rows. */
INLINE void transpose(floats *x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        ints low, high;
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = lane & half ? LANES + lane - half : lane;
            high[lane] = lane & half ? LANES + lane : lane + half;
        }
#pragma GCC unroll 8
        for (int pair = 0; pair < LANES / 2; pair++) {
            int i = pair / half * 2 * half + pair % half;
            floats first = x[i], second = x[i + half];
            x[i] = __builtin_shuffle(first, second, low);
            x[i + half] = __builtin_shuffle(first, second, high);
        }
    }
}

/* A block of a tree's keys. Key j is seen by node i where index[j] <= i < end[j]. For more than a
 * pair of rows: columns [dim][BLOCK] of the keys, rows [BLOCK][dim] of the values, in float32. */
typedef struct {
    const char *keys, *values;
    int64_t places[BLOCK], count; /* first element of each in the pool; behind the last, of the first */
    int32_t index[BLOCK], end[BLOCK];
    float *columns, *rows;
} Block;

/* Keys start, start + 1, ... of the root and then the tree, as every row sees or does not see them. */
INLINE void find(const Tree *tree, int64_t start, int64_t head, int64_t kv_heads, int64_t dim,
                 Block *block) {
    int64_t left = tree->root_length + tree->nodes - start;
    block->count = left < BLOCK ? left : BLOCK;
    for (int64_t j = 0; j < BLOCK; j++) {
        int64_t place = start + (j < block->count ? j : 0), node = place - tree->root_length;
        int64_t slot = node < 0 ? tree->root[place] : tree->slots[node];
        block->places[j] = (slot * kv_heads + head) * dim;
        block->index[j] = j < block->count ? node < 0 ? 0 : tree->first + node : INT32_MAX;
        block->end[j] = node < 0 ? INT32_MAX : tree->ends[node];
    }
}

/* Keys that a row sees, all of them. slots [left] */
INLINE void take(const int64_t *slots, int64_t left, int64_t head, int64_t kv_heads, int64_t dim,
                 Block *block) {
    block->count = left < BLOCK ? left : BLOCK;
    for (int64_t j = 0; j < BLOCK; j++) {
        block->places[j] = (slots[j < block->count ? j : 0] * kv_heads + head) * dim;
        block->index[j] = j < block->count ? 0 : INT32_MAX;
        block->end[j] = INT32_MAX;
    }
}

/* Slots of a root from `start` on and then of a node's path; returns how many. */
INLINE int64_t path_of(const Tree *tree, int64_t start, int64_t node, int64_t *slots) {
    int64_t count = 0;
    for (int64_t i = start; i < tree->root_length; i++) slots[count++] = tree->root[i];
    for (int64_t j = 0; j <= node - tree->first; j++)
        if (node < tree->ends[j]) slots[count++] = tree->slots[j];
    return count;
}

INLINE int is_chain(const Tree *tree) {
    for (int64_t j = 0; j < tree->nodes; j++)
        if (tree->ends[j] != tree->first + tree->nodes) return 0;
    return 1;
}

INLINE void gather(int type, int64_t dim, Block *block) {
    for (int64_t j = 0; j < block->count; j += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            floats square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = load(type, block->keys, block->places[j + i] + d);
            transpose(square);
            for (int i = 0; i < LANES; i++)
                store(FLOAT32, block->columns, (d + i) * BLOCK + j, square[i]);
        }
    for (int64_t j = 0; j < block->count; j++)
        for (int64_t d = 0; d < dim; d += LANES)
            store(FLOAT32, block->rows, j * dim + d, load(type, block->values, block->places[j] + d));
}

/* One row of a softmax that is taken block by block. */
typedef struct {
    float *query, *mixed; /* [dim] */
    float top, weight;    /* largest score so far, sum of e^(score - top) */
    int64_t node;
} Row;

enum { PAIR = 2, PARTS = BLOCK / LANES };

/* Scores of `count` rows over a block, key by key from the pool. */
INLINE void scores_by_key(int type, int count, const Row *row, const Block *block, int64_t dim,
                          floats scores[][PARTS]) {
    for (int part = 0; part * LANES < block->count; part++) {
        floats products[PAIR][LANES] = {};
        for (int i = 0; i < LANES; i++)
            for (int64_t d = 0; d < dim; d += LANES) {
                floats key = load(type, block->keys, block->places[part * LANES + i] + d);
                for (int r = 0; r < count; r++)
                    products[r][i] += load(FLOAT32, row[r].query, d) * key;
            }
        for (int r = 0; r < count; r++) {
            transpose(products[r]);
            for (int half = LANES / 2; half; half /= 2)
                for (int i = 0; i < half; i++) products[r][i] += products[r][i + half];
            scores[r][part] = products[r][0];
        }
    }
}

/* The same from its columns, where there are rows enough to make them: in the same order, sixteen
 * sums over every sixteenth dimension and then their sums by halves, so that a row's bits do not
 * depend on how many rows there are. */
INLINE void scores_by_column(int count, const Row *row, const Block *block, int64_t dim,
                             floats scores[][PARTS]) {
    for (int r = 0; r < count; r++) {
        floats open[5][PARTS]; /* sums of 1, 2, 4, 8 and 16 that wait for their other half */
        int top = 0;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++, top++) {
            int lane = (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3;
            for (int p = 0; p < PARTS; p++) open[top][p] = (floats){};
            for (int64_t d = lane; d < dim; d += LANES)
                for (int p = 0; p < PARTS; p++)
                    open[top][p] +=
                        row[r].query[d] * load(FLOAT32, block->columns, d * BLOCK + p * LANES);
            for (int halves = i; halves & 1; halves >>= 1, top--)
                for (int p = 0; p < PARTS; p++) open[top - 1][p] += open[top][p];
        }
        for (int p = 0; p < PARTS; p++) scores[r][p] = open[0][p];
    }
}

/* weights @ rows, added to what `count` rows mixed so far, `vectors` of them from dimension d on. */
INLINE void mix(int type, int gathered, int count, int vectors, Row *row, const Block *block,
                float weights[][BLOCK], const float *kept, int64_t d, int64_t dim) {
    floats x[PAIR][PARTS];
    for (int r = 0; r < count; r++)
        for (int i = 0; i < vectors; i++)
            x[r][i] = load(FLOAT32, row[r].mixed, d + i * LANES) * kept[r];
    for (int64_t j = 0; j < block->count; j++)
        for (int i = 0; i < vectors; i++) {
            floats value = gathered ? load(FLOAT32, block->rows, j * dim + d + i * LANES)
                                    : load(type, block->values, block->places[j] + d + i * LANES);
            for (int r = 0; r < count; r++) x[r][i] += weights[r][j] * value;
        }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < vectors; i++) store(FLOAT32, row[r].mixed, d + i * LANES, x[r][i]);
}

INLINE void attend_block(int type, int gathered, int count, Row *row, const Block *block,
                         int64_t dim) {
    floats s[PAIR][PARTS] = {};
    float weights[PAIR][BLOCK], kept[PAIR];
    if (gathered)
        scores_by_column(count, row, block, dim, s);
    else
        scores_by_key(type, count, row, block, dim, s);
    for (int r = 0; r < count; r++) {
        floats best = all(-INFINITY), added = {};
        for (int i = 0; i < PARTS; i++) {
            ints index, end, node = (int32_t)row[r].node - (ints){};
            memcpy(&index, block->index + i * LANES, sizeof index);
            memcpy(&end, block->end + i * LANES, sizeof end);
            s[r][i] = choose((index <= node) & (node < end), s[r][i], all(-INFINITY));
            best = choose(s[r][i] > best, s[r][i], best);
        }
        float peak = largest(best);
        peak = peak > row[r].top ? peak : row[r].top;
        float base = peak == -INFINITY ? 0 : peak; /* nothing seen yet: weights of zero */
        kept[r] = sum(exponential(all(row[r].top - base))) / LANES;
        for (int i = 0; i < PARTS; i++) {
            floats weight = exponential(s[r][i] - base);
            store(FLOAT32, weights[r], i * LANES, weight);
            added += weight;
        }
        row[r].top = peak;
        row[r].weight = row[r].weight * kept[r] + sum(added);
    }
    int64_t d = 0;
    for (; d + PARTS * LANES <= dim; d += PARTS * LANES)
        mix(type, gathered, count, PARTS, row, block, weights, kept, d, dim);
    for (; d < dim; d += LANES)
        mix(type, gathered, count, 1, row, block, weights, kept, d, dim);
}

INLINE void attend_rows(int type, int gathered, int64_t count, Row *rows, const Block *block,
                        int64_t dim) {
    int64_t r = 0;
    if (gathered)
        for (; r + PAIR <= count; r += PAIR) attend_block(type, 1, PAIR, rows + r, block, dim);
    else
        for (; r + PAIR <= count; r += PAIR) attend_block(type, 0, PAIR, rows + r, block, dim);
    if (r == count) return;
    if (gathered)
        attend_block(type, 1, 1, rows + r, block, dim);
    else
        attend_block(type, 0, 1, rows + r, block, dim);
}

/* The rows of one tree and one KV head, with every query head of its group. What a row sees is one
 * list, the root and its own path, in blocks that begin at multiples of BLOCK: where nodes lie in a
 * tree, and what else is in it, changes no bit. Whole blocks of the root are shared by all rows,
 * and those of a chain, whose nodes lie behind each other. */
INLINE void attend(int type, const char *query, const char *keys, const char *values, char *out,
                   const Tree *tree, int64_t head, int64_t heads, int64_t kv_heads, int64_t dim,
                   float scale) {
    int64_t group = heads / kv_heads, num_rows = tree->count * group;
    float queries[num_rows * dim], mixed[num_rows * dim], columns[dim * BLOCK], rows[BLOCK * dim];
    Row states[num_rows];
    Block block = {.keys = keys, .values = values, .columns = columns, .rows = rows};
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t at = ((tree->row + r / group) * heads + head * group + r % group) * dim;
        int64_t n = r / group, node = tree->queries ? tree->queries[n] : tree->first + n;
        states[r] = (Row){queries + r * dim, mixed + r * dim, -INFINITY, 0, node};
        for (int64_t d = 0; d < dim; d += LANES) {
            store(FLOAT32, states[r].query, d, load(type, query, at + d) * scale);
            store(FLOAT32, states[r].mixed, d, (floats){});
        }
    }
    memset(columns, 0, sizeof columns);
    int64_t total = tree->root_length + tree->nodes;
    int64_t shared = is_chain(tree) ? total : tree->root_length / BLOCK * BLOCK;
    for (int64_t start = 0; start < shared; start += BLOCK) {
        find(tree, start, head, kv_heads, dim, &block);
        int gathered = num_rows > PAIR;
        if (gathered) gather(type, dim, &block);
        attend_rows(type, gathered, num_rows, states, &block, dim);
    }
    for (int64_t n = 0; n < tree->count && shared < total; n++) {
        int64_t slots[total - shared];
        int64_t count = path_of(tree, shared, states[n * group].node, slots);
        for (int64_t start = 0; start < count; start += BLOCK) {
            take(slots + start, count - start, head, kv_heads, dim, &block);
            attend_rows(type, 0, group, states + n * group, &block, dim);
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t at = ((tree->row + r / group) * heads + head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            store(type, out, at + d, load(FLOAT32, states[r].mixed, d) / states[r].weight);
    }
}

/* query, out [rows, heads, dim]; keys, values [slots, kv_heads, dim]. together: threads share it. */
void tree_attention(int type, const char *query, const char *keys, const char *values, char *out,
                    const Tree *trees, int64_t num_trees, int64_t heads, int64_t kv_heads,
                    int64_t dim, float scale, int together) {
#pragma omp parallel for schedule(dynamic) if (together)
    for (int64_t i = 0; i < num_trees * kv_heads; i++) {
        const Tree *tree = trees + i / kv_heads;
        int64_t head = i % kv_heads;
        if (type == FLOAT32)
            attend(FLOAT32, query, keys, values, out, tree, head, heads, kv_heads, dim, scale);
        else
            attend(BFLOAT16, query, keys, values, out, tree, head, heads, kv_heads, dim, scale);
    }
}
