/* The catalogue's trie as kernels/trie/trie.py lays it out, with its insertions. */
#pragma once
#include "functions.h"

typedef struct {
    const int32_t *first_child, *codes, *first_leaf, *last_leaf; /* [nodes (+ 1)] of the base */
    int64_t nodes;                                               /* of the base */
    int64_t all_nodes, any_leaf;
    /* [num_changed] nodes with inserted ids at or below them, ascending; empty without insertions */
    const int64_t *changed, *changed_first, *changed_last, *later_first, *later_count;
    int64_t num_changed;
    const int64_t *own_codes; /* of the inserted nodes */
    const int64_t *inserted;  /* [num_inserted] base leaves before each inserted id, ascending */
    int64_t num_inserted;
} Trie;

/* The children of a node: `count` nodes from `first` on, then `more` nodes from `later` on. */
typedef struct {
    int64_t first, count, later, more;
} Children;

typedef struct {
    int64_t first, last;
} Leaves;

/* Returns how many of the ascending numbers are lower than `than`. */
INLINE int64_t lower(const int64_t *numbers, int64_t count, int64_t than) {
    int64_t at = 0;
    while (count > 0) {
        int64_t half = count / 2;
        int below = numbers[at + half] < than;
        at = below ? at + half + 1 : at;
        count = below ? count - half - 1 : half;
    }
    return at;
}

/* Returns the index of a number among ascending ones, or -1. */
INLINE int64_t find(const int64_t *numbers, int64_t count, int64_t number) {
    int64_t at = lower(numbers, count, number);
    return at < count && numbers[at] == number ? at : -1;
}

INLINE Children children(const Trie *trie, int64_t node) {
    Children found = {0};
    if (node < trie->nodes) {
        found.first = trie->first_child[node];
        found.count = trie->first_child[node + 1] - found.first;
    }
    int64_t at = find(trie->changed, trie->num_changed, node);
    if (at >= 0) {
        found.later = trie->later_first[at];
        found.more = trie->later_count[at];
    }
    return found;
}

INLINE int64_t child(Children of, int64_t number) {
    return number < of.count ? of.first + number : of.later + number - of.count;
}

INLINE int64_t last_code(const Trie *trie, int64_t node) {
    return node < trie->nodes ? trie->codes[node] : trie->own_codes[node - trie->nodes];
}

INLINE Leaves leaves(const Trie *trie, int64_t node) {
    int64_t at = find(trie->changed, trie->num_changed, node);
    if (at >= 0) return (Leaves){trie->changed_first[at], trie->changed_last[at]};
    int64_t first = trie->first_leaf[node], last = trie->last_leaf[node];
    int64_t moved = lower(trie->inserted, trie->num_inserted, first + 1);
    return (Leaves){first + moved, last + moved};
}
