/* Masks of allowed tokens. */
#include "functions.h"

enum { WORD_BITS = 32, WORTH_MASK_THREADS = 1 << 18 };

/* logits: [count, vocabulary] float32, in place. bits: [masks, words]. rows: [count] the mask of
 * each row; -1 allows all tokens. */
void ban_masked(float *logits, const uint32_t *bits, const int64_t *rows, int64_t count,
                int64_t vocabulary, int64_t words) {
    PARALLEL_FOR(if (count > 1 && count * vocabulary > WORTH_MASK_THREADS))
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0) continue;
        const uint32_t *mask = bits + rows[i] * words;
        float *row = logits + i * vocabulary;
        for (int64_t word = 0; word < words; word++) {
            uint32_t own = mask[word];
            if (own == UINT32_MAX) continue;
            int64_t start = word * WORD_BITS, size = vocabulary - start;
            if (size > WORD_BITS) size = WORD_BITS;
            for (int64_t bit = 0; bit < size; bit++)
                if (!(own >> bit & 1)) row[start + bit] = -INFINITY;
        }
    }
}
