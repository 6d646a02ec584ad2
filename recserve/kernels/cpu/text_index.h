/* Where the n-grams of a growing text ended before.
 *
 * A chain of positions per bucket of n-grams, newest first: a head by hash, and for each position
 * the one before it. Adding a token costs the same however long the text is. Chains hold what only
 * shares the bucket too, so that whoever walks one compares the tokens. Positions count from the
 * first token ever added; heads and chains hold them plus one, zero is the end.
 */
#pragma once
#include "vectors.h"

typedef struct {
    int64_t size;     /* slots and buckets, a power of two; at least capacity + the longest n-gram */
    int64_t capacity; /* tokens kept, the newest */
    int64_t stop;     /* one past the newest position */
    int64_t known;    /* tokens since the last gap */
    int64_t num_lengths;
    const int64_t *lengths; /* [num_lengths] of the n-grams, ascending */
    int64_t *tokens;        /* [size], negative: a gap, which belongs to no n-gram */
    int64_t *heads;         /* [num_lengths, size] */
    int64_t *earlier;       /* [size, num_lengths] */
} TextIndex;

INLINE int64_t start(const TextIndex *text) {
    return text->stop > text->capacity ? text->stop - text->capacity : 0;
}

INLINE int64_t token_at(const TextIndex *text, int64_t position) {
    return text->tokens[position & (text->size - 1)];
}

INLINE uint64_t joined(uint64_t hash, int64_t token) {
    return (hash + (uint64_t)token + 1) * 0x9E3779B97F4A7C15u;
}

/* Where the newest position of a bucket is kept. hash: of an n-gram's tokens, the last first. */
INLINE int64_t *head(const TextIndex *text, int64_t which, uint64_t hash) {
    int64_t bucket = (hash >> 32) & (text->size - 1);
    return text->heads + which * text->size + bucket;
}

/* Where the position before is kept, in the chain of the which-th n-gram that ends here. */
INLINE int64_t *before(const TextIndex *text, int64_t which, int64_t position) {
    return text->earlier + (position & (text->size - 1)) * text->num_lengths + which;
}

/* How many tokens up to `position` equal those up to `last`, at most `most`. */
INLINE int64_t alike(const TextIndex *text, int64_t position, const int64_t *last, int64_t most) {
    int64_t same = 0;
    while (same < most && same <= position && token_at(text, position - same) == last[-same]) same++;
    return same;
}

void extend_text(TextIndex *text, const int64_t *tokens, int64_t count);
