/* Greedy acceptance: each tree's path of likeliest tokens. */
#include "functions.h"

enum { BLOCK = 64, CANDIDATE = 0, WORTH_THREADS = 1 << 16 };

INLINE float number(int type, const char *row, int64_t at) {
    if (type == FLOAT32) return ((const float *)row)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns the index of the largest of `size` numbers, the first one of equals. `flawed` is set if
 * one is NaN, or the largest is infinite; the index then only lies inside the row. */
INLINE int64_t first_largest(int type, const char *row, int64_t size, int *flawed) {
    float best = -INFINITY;
    int64_t at = 0, where = 0; /* the first block that holds the largest number */
    ints odd = {0};
    for (; at + BLOCK * LANES <= size; at += BLOCK * LANES) {
        floats even = load(type, row, at), other = even;
        UNROLL(4)
        for (int i = 0; i < BLOCK; i += 2) {
            floats x = load(type, row, at + i * LANES), y = load(type, row, at + (i + 1) * LANES);
            even = larger(x, even), other = larger(y, other);
            odd |= (x != x) | (y != y);
        }
        float most = largest(larger(even, other));
        if (most > best) best = most, where = at;
    }
    for (int i = 0; i < LANES; i++) *flawed |= odd[i] != 0;
    for (; at < size; at++) {
        float x = number(type, row, at);
        *flawed |= x != x;
        if (x > best) best = x, where = at;
    }
    *flawed |= !(best < INFINITY && best > -INFINITY);
    if (*flawed) return 0;
    while (number(type, row, where) != best) where++;
    return where;
}

/* logits: [nodes, vocabulary]. tokens, parents, kinds: [nodes]; kinds may be NULL. offsets: [trees +
 * 1]. out: [trees, 2 depth + 5] as acceptance.py's pack_paths. Only nodes on a path are read. */
void greedy_paths(int type, const char *logits, int64_t vocabulary, const int64_t *tokens,
                  const int64_t *parents, const int64_t *kinds, const int64_t *offsets,
                  int64_t trees, int64_t depth, int64_t *out) {
    int64_t width = 2 * depth + 5, bytes = vocabulary * (type == FLOAT32 ? 4 : 2);
    PARALLEL_FOR(if (trees > 1 && trees * vocabulary > WORTH_THREADS))
    for (int64_t tree = 0; tree < trees; tree++) {
        int64_t *nodes = out + tree * width, *path_tokens = nodes + depth + 3;
        int64_t node = offsets[tree], length = 0, token;
        int flawed = 0;
        nodes[0] = node, path_tokens[0] = tokens[node];
        for (;;) {
            const char *row = logits + node * bytes;
            token = type == FLOAT32 ? first_largest(FLOAT32, row, vocabulary, &flawed)
                                    : first_largest(BFLOAT16, row, vocabulary, &flawed);
            int64_t child = node + 1, stop = offsets[tree + 1];
            while (child < stop && (parents[child] != node || tokens[child] != token ||
                                    (kinds && kinds[child] != CANDIDATE)))
                child++;
            if (child == stop || length == depth) break;
            node = child;
            nodes[++length] = node, path_tokens[length] = token;
        }
        for (int64_t i = length + 1; i <= depth; i++) nodes[i] = -1, path_tokens[i] = 0;
        nodes[depth + 1] = length, nodes[depth + 2] = token, nodes[width - 1] = flawed;
    }
}
