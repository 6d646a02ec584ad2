/* Scored prefixes as one table in ascending order of keys (level_search.scored_table). */
#include "functions.h"

#include <stdlib.h>

typedef struct {
    int64_t key, row;
} Row;

static int by_key(const void *one, const void *other) {
    const Row *a = one, *b = other;
    return (a->key > b->key) - (a->key < b->key);
}

/* Merges the table of prefixes scored before with `added` ones in any order: keys, slots, and
 * states of `bytes` bytes each. No key occurs in both. */
void scored_table(int64_t count, const int64_t *keys, const int64_t *slots, const char *hidden,
                  int64_t added, const int64_t *added_keys, const int64_t *added_slots,
                  const char *added_hidden, int64_t *all_keys, int64_t *all_slots,
                  char *all_hidden, int64_t bytes) {
    Row *rows = malloc((added + 1) * sizeof *rows);
    for (int64_t i = 0; i < added; i++) rows[i] = (Row){added_keys[i], i};
    qsort(rows, added, sizeof *rows, by_key);
    for (int64_t i = 0, old = 0, new = 0; i < count + added; i++) {
        int is_old = new == added || (old < count && keys[old] < rows[new].key);
        int64_t row = is_old ? old++ : rows[new++].row;
        all_keys[i] = (is_old ? keys : added_keys)[row];
        all_slots[i] = (is_old ? slots : added_slots)[row];
        memcpy(all_hidden + i * bytes, (is_old ? hidden : added_hidden) + row * bytes, bytes);
    }
    free(rows);
}
