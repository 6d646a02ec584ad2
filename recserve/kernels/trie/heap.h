/* The best of many candidates, in a heap with the worst on top. Ties go to the lower node. */
#pragma once
#include "vectors.h"

typedef struct {
    float score;
    int64_t node, parent;
} Candidate;

INLINE int better(Candidate one, Candidate other) {
    return one.score > other.score || (one.score == other.score && one.node < other.node);
}

/* Restores a heap in which the element `at` may be better than the elements below it. */
INLINE void sink(Candidate *heap, int64_t size, int64_t at) {
    Candidate moved = heap[at];
    for (int64_t below; (below = 2 * at + 1) < size; at = below) {
        if (below + 1 < size && better(heap[below], heap[below + 1])) below++;
        if (!better(moved, heap[below])) break;
        heap[at] = heap[below];
    }
    heap[at] = moved;
}

/* Adds a candidate to the best `most`; returns the new size. A full heap replaces its worst. */
INLINE int64_t offer(Candidate *heap, int64_t size, int64_t most, Candidate one) {
    if (size == most) {
        heap[0] = one;
        sink(heap, size, 0);
        return size;
    }
    int64_t at = size;
    for (; at && better(heap[(at - 1) / 2], one); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = one;
    return size + 1;
}

INLINE void best_first(Candidate *heap, int64_t size) {
    while (size > 1) {
        Candidate worst = heap[0];
        heap[0] = heap[--size];
        heap[size] = worst;
        sink(heap, size, 0);
    }
}
