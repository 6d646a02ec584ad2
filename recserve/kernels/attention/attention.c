/* Tree attention over prefix and tree as one list of keys, block by block.
 *
 * Per tree and KV head: R rows (nodes times query heads of the group), m keys, D dimensions. A
 * block of keys is read once for all rows. It is transposed, so that a vector holds the keys of
 * one dimension, and four rows at a time multiply it from the nearest cache. Cost: 2 R m D
 * multiply-adds and 2 m D elements read. The softmax is computed as in FlashAttention (arXiv
 * 2205.14135). SiLU (HSTU, arXiv 2402.17152) needs no sum of weights, only a constant divisor.
 */
#include "functions.h"

#define BLOCK (2 * LANES) /* keys whose scores are computed at a time */
#define MOST_ROWS 128

/* A block of a tree's keys. Node i sees key j if index[j] <= i < end[j]. In a block of the prefix of
 * a tree with limits, index[j] is the key's place in the prefix, and i the row's last place there.
 * With TILE rows or more, the block also has float32 copies: columns [dim][BLOCK] of the keys and
 * rows [BLOCK][dim] of the values. */
typedef struct {
    const char *keys, *values;
    int64_t places[BLOCK], count; /* element of each key in the pool; padding repeats the first */
    int32_t index[BLOCK], end[BLOCK];
    int seen, limited; /* whether all rows see all of the block, and whether limits apply */
    int softmax;
    float *columns, *rows;
} Block;

/* Selects the keys start, start + 1, ... before `stop` of prefix and tree, with their visibility.
 * least: prefix tokens that every row sees. */
INLINE void find(const Tree *tree, int64_t start, int64_t stop, int64_t least, int64_t head,
                 int64_t kv_heads, int64_t dim, Block *block) {
    int64_t left = stop - start;
    block->count = left < BLOCK ? left : BLOCK;
    block->seen = start + BLOCK <= least;
    block->limited = tree->limits && start < tree->prefix_length;
    for (int64_t j = 0; j < BLOCK; j++) {
        int64_t place = start + (j < block->count ? j : 0), node = place - tree->prefix_length;
        int64_t slot = node < 0 ? tree->prefix[place] : tree->slots[node];
        block->places[j] = (slot * kv_heads + head) * dim;
        int64_t index = node >= 0 ? tree->first + node : block->limited ? place : 0;
        block->index[j] = j < block->count ? index : INT32_MAX;
        block->end[j] = node < 0 ? INT32_MAX : tree->ends[node];
    }
}

/* Selects keys of which a row sees all. slots: [left]. */
INLINE void take(const int64_t *slots, int64_t left, int64_t head, int64_t kv_heads, int64_t dim,
                 Block *block) {
    block->count = left < BLOCK ? left : BLOCK;
    block->seen = left >= BLOCK;
    block->limited = 0;
    for (int64_t j = 0; j < block->count || j % LANES; j++) {
        block->places[j] = (slots[j < block->count ? j : 0] * kv_heads + head) * dim;
        block->index[j] = j < block->count ? 0 : INT32_MAX;
        block->end[j] = INT32_MAX;
    }
}

/* Nodes of a tree whose rows attend together, so that their state fits in the nearer caches. */
INLINE int64_t rows_at_once(int64_t group) { return group < MOST_ROWS ? MOST_ROWS / group : 1; }

/* Returns the first element of a node's queries of a KV head. */
INLINE int64_t row_at(const Tree *tree, int64_t n, int64_t head, int64_t group, int64_t heads,
                      int64_t dim) {
    return ((tree->row + n) * heads + head * group) * dim;
}

/* Finds parent (-1 at the top) and depth of a tree's first `count` nodes, as tree indices. */
INLINE void find_parents(const Tree *tree, int64_t count, int32_t *parents, int32_t *depths) {
    for (int32_t j = 0; j < count; j++) {
        int32_t parent = j - 1;
        while (parent >= 0 && tree->ends[parent] <= tree->first + j) parent = parents[parent];
        parents[j] = parent;
        depths[j] = parent < 0 ? 0 : depths[parent] + 1;
    }
}

/* Prefetches a slot's key and value, because slots are too far apart for hardware prefetch. */
INLINE void prefetch_slot(int type, const Block *block, int64_t slot, int64_t head, int64_t kv_heads,
                    int64_t dim) {
    int64_t size = (type == FLOAT32 ? 4 : 2) * dim, place = (slot * kv_heads + head) * size;
    for (int64_t line = place; line < place + size; line += 64) {
        __builtin_prefetch(block->keys + line);
        __builtin_prefetch(block->values + line);
    }
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

/* State of one row of a blockwise softmax, or of a sum with SiLU. */
typedef struct {
    float *query, *mixed; /* [dim] */
    float top;            /* largest score so far */
    floats weight;        /* sums of e^(score - top) per lane */
    int64_t node, last;   /* last: the last prefix place that it sees, with limits */
} Row;

enum { TILE = 4, PAIR = 2, PARTS = BLOCK / LANES, WIDE = REGISTERS / 8 };

/* Computes the scores of `count` rows over a block, reading key by key from the pool. */
INLINE void scores_by_key(int type, int count, const Row *row, const Block *block, int64_t dim,
                          floats scores[TILE][PARTS]) {
    for (int part = 0; part * LANES < block->count; part++) {
        floats products[PAIR][LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t place = block->places[part * LANES + i];
            floats key = load(type, block->keys, place), products_of[PAIR];
            for (int r = 0; r < count; r++) products_of[r] = load(FLOAT32, row[r].query, 0) * key;
            for (int64_t d = LANES; d < dim; d += LANES) {
                key = load(type, block->keys, place + d);
                for (int r = 0; r < count; r++)
                    products_of[r] = mul_add(load(FLOAT32, row[r].query, d), key, products_of[r]);
            }
            for (int r = 0; r < count; r++) products[r][i] = products_of[r];
        }
        for (int r = 0; r < count; r++) scores[r][part] = sums(products[r]);
    }
}

/* Computes the same scores from the block's columns, where there are enough rows to build them. The
 * order of additions is the same: a sum per lane over every LANES-th dimension, then their sums by
 * halves. So a row's bits do not depend on the number of rows. */
INLINE void scores_by_column(int count, const Row *row, const Block *block, int64_t dim,
                             floats scores[TILE][PARTS]) {
    floats open[4][TILE][PARTS]; /* sums of 2, 4, .. LANES lanes that wait for their other half */
    int top = 0;
    UNROLL(8)
    for (int i = 0; i < LANES / 2; i++, top++) {
        int lane = 0;
        UNROLL(4)
        for (int bit = 1, back = LANES / 4; back; bit <<= 1, back >>= 1) lane |= i & bit ? back : 0;
        floats sums[2][TILE][PARTS] = {};
        for (int64_t d = lane; d < dim; d += LANES)
            UNROLL(2)
            for (int half = 0; half < 2; half++)
                UNROLL(4)
                for (int r = 0; r < count; r++)
                    UNROLL(4)
                    for (int p = 0; p < PARTS; p++)
                        sums[half][r][p] =
                            mul_add(broadcast(row[r].query[d + half * LANES / 2]),
                                    load(FLOAT32, block->columns,
                                         (d + half * LANES / 2) * BLOCK + p * LANES),
                                    sums[half][r][p]);
        UNROLL(4)
        for (int r = 0; r < count; r++)
            UNROLL(4)
            for (int p = 0; p < PARTS; p++) {
                floats sum = sums[0][r][p] + sums[1][r][p];
                int to = top;
                for (int halves = i; halves & 1; halves >>= 1) sum += open[--to][r][p];
                open[to][r][p] = sum;
            }
        for (int halves = i; halves & 1; halves >>= 1) top--;
    }
    memcpy(scores, open[0], count * sizeof *scores);
}

/* Adds weights @ rows to the mixed values of `count` rows, `vectors` vectors from dimension d. */
INLINE void mix(int type, int gathered, int count, int vectors, Row *row, const Block *block,
                float weights[TILE][BLOCK], const float *kept, int64_t d, int64_t dim) {
    floats x[TILE][WIDE] = {};
    for (int64_t j = 0; j < block->count; j++)
        UNROLL(4)
        for (int i = 0; i < vectors; i++) {
            floats value = gathered ? load(FLOAT32, block->rows, j * dim + d + i * LANES)
                                    : load(type, block->values, block->places[j] + d + i * LANES);
            UNROLL(4)
            for (int r = 0; r < count; r++) x[r][i] = mul_add(broadcast(weights[r][j]), value, x[r][i]);
        }
    for (int r = 0; r < count; r++)
        for (int i = 0; i < vectors; i++) {
            floats before = load(FLOAT32, row[r].mixed, d + i * LANES);
            store(FLOAT32, row[r].mixed, d + i * LANES, mul_add(before, broadcast(kept[r]), x[r][i]));
        }
}

/* Returns which keys of a part of a block a row sees. */
INLINE ints seen_by(const Row *row, const Block *block, int part) {
    ints index, end, at = (int32_t)(block->limited ? row->last : row->node) - (ints){};
    memcpy(&index, block->index + part * LANES, sizeof index);
    memcpy(&end, block->end + part * LANES, sizeof end);
    return (index <= at) & (at < end);
}

/* Turns the scores of `count` rows into silu(score), 0 where a row does not see the key. */
INLINE void weigh_silu(int count, Row *row, const Block *block, floats scores[TILE][PARTS],
                       float weights[TILE][BLOCK], float *kept) {
    int parts = count == TILE ? PARTS : (block->count + LANES - 1) / LANES;
    for (int r = 0; r < count; r++) {
        for (int i = 0; i < parts; i++) {
            floats score = scores[r][i], away = choose(score < -88.0f, broadcast(88), -score);
            floats weight = score / (exponential(away) + 1.0f);
            if (!block->seen) weight = choose(seen_by(row + r, block, i), weight, broadcast(0));
            store(FLOAT32, weights[r], i * LANES, weight);
        }
        kept[r] = 1;
    }
}

/* Turns the scores of `count` rows into weights, 0 where a row does not see the key. kept: factor
 * that rescales a row's earlier sums. */
INLINE void weigh(int count, Row *row, const Block *block, floats scores[TILE][PARTS],
                  float weights[TILE][BLOCK], float *kept) {
    int parts = count == TILE ? PARTS : (block->count + LANES - 1) / LANES;
    floats tops = broadcast(-INFINITY), peaks = tops; /* lane r belongs to row r */
    for (int r = 0; r < count; r++) {
        floats best = broadcast(-INFINITY);
        for (int i = 0; i < parts; i++) {
            if (!block->seen) {
                ints sees = seen_by(row + r, block, i);
                scores[r][i] = choose(sees, scores[r][i], broadcast(-INFINITY));
            }
            best = larger(scores[r][i], best);
        }
        tops[r] = row[r].top;
        peaks[r] = largest(best);
    }
    peaks = larger(peaks, tops);
    floats base = choose(peaks == -INFINITY, broadcast(0), peaks); /* no key seen yet: weights are 0 */
    floats fading = exponential(tops - base);
    for (int r = 0; r < count; r++) {
        floats added = {};
        for (int i = 0; i < parts; i++) {
            floats weight = exponential(scores[r][i] - base[r]);
            store(FLOAT32, weights[r], i * LANES, weight);
            added += weight;
        }
        row[r].top = peaks[r];
        row[r].weight = mul_add(row[r].weight, broadcast(fading[r]), added);
        kept[r] = fading[r];
    }
}

INLINE void attend_block(int type, int gathered, int count, Row *row, const Block *block,
                         int64_t dim) {
    floats scores[TILE][PARTS];
    float weights[TILE][BLOCK], kept[TILE];
    if (gathered)
        scores_by_column(count, row, block, dim, scores);
    else
        scores_by_key(type, count, row, block, dim, scores);
    if (block->softmax)
        weigh(count, row, block, scores, weights, kept);
    else
        weigh_silu(count, row, block, scores, weights, kept);
    int64_t d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        mix(type, gathered, count, WIDE, row, block, weights, kept, d, dim);
    for (; d + PAIR * LANES <= dim; d += PAIR * LANES)
        mix(type, gathered, count, PAIR, row, block, weights, kept, d, dim);
    if (d < dim) mix(type, gathered, count, 1, row, block, weights, kept, d, dim);
}

/* These are separate functions, because the compiler keeps fewer sums in registers if it inlines
 * them. */
static __attribute__((noinline)) void attend_gathered(int64_t count, Row *rows, const Block *block,
                                                      int64_t dim) {
    int64_t r = 0;
    for (; r + TILE <= count; r += TILE) attend_block(FLOAT32, 1, TILE, rows + r, block, dim);
    for (; r < count; r++) attend_block(FLOAT32, 1, 1, rows + r, block, dim);
}

static __attribute__((noinline)) void attend_scattered(int type, int64_t count, Row *rows,
                                                       const Block *block, int64_t dim) {
    int64_t r = 0;
    if (type == FLOAT32) {
        for (; r + PAIR <= count; r += PAIR)
            attend_block(FLOAT32, 0, PAIR, rows + r, block, dim);
        if (r < count) attend_block(FLOAT32, 0, 1, rows + r, block, dim);
    } else {
        for (; r + PAIR <= count; r += PAIR)
            attend_block(BFLOAT16, 0, PAIR, rows + r, block, dim);
        if (r < count) attend_block(BFLOAT16, 0, 1, rows + r, block, dim);
    }
}

/* What the rows of one call of `attend` share. */
typedef struct {
    int type;
    const Tree *tree;
    int64_t head, kv_heads, dim, group, num_rows;
    Row *rows;
    Block block;
} Call;

/* Attends from all rows to the keys start .. stop of prefix and tree, which are the same list for
 * every row that sees one of them. */
INLINE void attend_to_all(Call *call, int64_t start, int64_t stop, int64_t least) {
    const Tree *tree = call->tree;
    Block *block = &call->block;
    int64_t head = call->head, kv_heads = call->kv_heads, dim = call->dim;
    for (int64_t first = 0; start < stop; start += BLOCK) {
        find(tree, start, stop, least, head, kv_heads, dim, block);
        if (start >= tree->prefix_length)
            while (call->rows[first].node < block->index[0]) first++; /* these see none of it */
        int64_t count = call->num_rows - first;
        if (call->num_rows < TILE) {
            attend_scattered(call->type, count, call->rows + first, block, dim);
            continue;
        }
        gather(call->type, dim, block);
        for (int64_t j = start + BLOCK; j < start + 2 * BLOCK && j < tree->prefix_length; j++)
            prefetch_slot(call->type, block, tree->prefix[j], head, kv_heads, dim);
        attend_gathered(count, call->rows + first, block, dim);
    }
}

/* Attends from each row to the prefix's places from `shared` on, and to its own path. */
INLINE void attend_to_paths(Call *call, int64_t shared, const int32_t *parents,
                            const int32_t *depths) {
    const Tree *tree = call->tree;
    int64_t tail = tree->prefix_length - shared, group = call->group;
    for (int64_t r = 0; r < call->num_rows; r += group) {
        int64_t node = call->rows[r].node - tree->first, soon = r + 3 * group;
        int64_t size = tail + (node < 0 ? 0 : depths[node] + 1), slots[size + 1];
        if (soon < call->num_rows && call->rows[soon].node >= tree->first)
            prefetch_slot(call->type, &call->block, tree->slots[call->rows[soon].node - tree->first],
                    call->head, call->kv_heads, call->dim);
        if (tail)  // the prefix may be null where it is empty, and memcpy is undefined then
            memcpy(slots, tree->prefix + shared, tail * sizeof *slots);
        for (int64_t at = node; at >= 0; at = parents[at])
            slots[tail + depths[at]] = tree->slots[at];
        for (int64_t start = 0; start < size; start += BLOCK) {
            take(slots + start, size - start, call->head, call->kv_heads, call->dim, &call->block);
            attend_scattered(call->type, group, call->rows + r, &call->block, call->dim);
        }
    }
}

/* Attends from rows from, from + 1, ... of one tree and one KV head: at most MOST_ROWS rows, with
 * every query head of the group. A row sees one list of keys, the prefix and its own path, in blocks
 * that begin at multiples of BLOCK. So positions of nodes in a tree, and other nodes in it, change
 * no bit. All rows share the whole blocks of the prefix, and the blocks of a chain, whose nodes are
 * consecutive. With limits or SiLU the path is a list of its own, so that all rows share all blocks
 * of the prefix. */
INLINE void attend(int type, const char *query, const char *keys, const char *values, char *out,
                   const Tree *tree, int64_t from, int64_t head, int64_t heads, int64_t kv_heads,
                   int64_t dim, float scale, float normalizer) {
    int64_t group = heads / kv_heads, count = rows_at_once(group);
    if (from + count > tree->count) count = tree->count - from;
    int64_t num_rows = count * group, least = tree->prefix_length;
    float queries[num_rows * dim], mixed[num_rows * dim], columns[dim * BLOCK], rows[BLOCK * dim];
    Row states[num_rows];
    Call call = {type, tree, head, kv_heads, dim, group, num_rows, states,
                 {.keys = keys, .values = values, .softmax = !normalizer, .columns = columns,
                  .rows = rows}};
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t n = from + r / group, at = row_at(tree, n, head, group, heads, dim) + r % group * dim;
        int64_t node = tree->queries ? tree->queries[n] : tree->first + n;
        int64_t limit = tree->limits ? tree->limits[node] : INT64_MAX;
        if (limit > tree->prefix_length) limit = tree->prefix_length;
        if (limit < least) least = limit;
        states[r] = (Row){queries + r * dim, mixed + r * dim, -INFINITY, {}, node, limit - 1};
        for (int64_t d = 0; d < dim; d += LANES) {
            store(FLOAT32, states[r].query, d, load(type, query, at + d) * scale);
            store(FLOAT32, states[r].mixed, d, (floats){});
        }
    }
    memset(columns, 0, sizeof columns);
    int64_t wanted = states[num_rows - 1].node - tree->first + 1;
    if (wanted < 0) wanted = 0; /* all rows are nodes that belong to the prefix */
    int32_t parents[wanted + 1], depths[wanted + 1];
    find_parents(tree, wanted, parents, depths);
    int is_chain = !wanted || depths[wanted - 1] == wanted - 1, apart = normalizer || tree->limits;
    int64_t prefix = tree->prefix_length, total = prefix + wanted;
    int64_t shared = apart ? prefix : is_chain ? total : prefix / BLOCK * BLOCK;
    attend_to_all(&call, 0, shared, least);
    if (!is_chain)
        attend_to_paths(&call, shared, parents, depths);
    else if (apart)
        attend_to_all(&call, prefix, total, least);
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t at = row_at(tree, from + r / group, head, group, heads, dim) + r % group * dim;
        float weight = normalizer ? normalizer : sum(states[r].weight);
        for (int64_t d = 0; d < dim; d += LANES)
            store(type, out, at + d, load(FLOAT32, states[r].mixed, d) / weight);
    }
}

/* query, out: [rows, heads, dim]. keys, values: [slots, kv_heads, dim]. normalizer: 0 for softmax,
 * else the divisor of SiLU. together: whether threads share the call. */
void tree_attention(int type, const char *query, const char *keys, const char *values, char *out,
                    const Tree *trees, int64_t num_trees, int64_t heads, int64_t kv_heads,
                    int64_t dim, float scale, float normalizer, int together) {
    int64_t most = 0, step = rows_at_once(heads / kv_heads);
    for (int64_t i = 0; i < num_trees; i++) most = trees[i].count > most ? trees[i].count : most;
    int64_t steps = (most + step - 1) / step, each = steps * kv_heads;
    PARALLEL_FOR(schedule(dynamic) if (together))
    for (int64_t i = 0; i < num_trees * each; i++) {
        const Tree *tree = trees + i / each;
        int64_t from = i % steps * step, head = i % each / steps;
        if (from >= tree->count) continue;
        if (type == FLOAT32)
            attend(FLOAT32, query, keys, values, out, tree, from, head, heads, kv_heads, dim, scale,
                   normalizer);
        else
            attend(BFLOAT16, query, keys, values, out, tree, from, head, heads, kv_heads, dim,
                   scale, normalizer);
    }
}
