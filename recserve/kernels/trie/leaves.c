/* Converts a filter over the catalogue to bits of a trie's leaves. */
#include "functions.h"

/* rows: a bit for every item row. leaf_rows: [leaves] row at each leaf rank. words, counts: [leaves
 * / 32 + 1] bits by leaf rank, and the set bits before each word. */
void leaf_bits(const uint8_t *rows, const int32_t *leaf_rows, int64_t leaves, uint32_t *words,
               int32_t *counts) {
    int32_t before = 0;
    for (int64_t first = 0, word = 0; first <= leaves; first += 32, word++) {
        int64_t many = leaves - first < 32 ? leaves - first : 32;
        uint32_t bits = 0;
        for (int64_t i = 0; i < many; i++) {
            uint32_t row = leaf_rows[first + i];
            bits |= (uint32_t)(rows[row >> 3] >> (row & 7) & 1) << i;
        }
        words[word] = bits;
        counts[word] = before;
        before += __builtin_popcount(bits);
    }
}
