/* Beam search down a trie, several levels in one call.
 *
 *     score[child] = score[beam] + logit[child] - log sum exp(logits of the beam's children)
 *
 * For every request, the best children over all beams survive, ties to the lower node. Children
 * that cannot enter the answer any more are dropped (search/beam_search.py). The logits have one of
 * three sources: states that a model computed for some prefixes, a recurrent head that is stepped
 * during the search (NEZHA, arXiv 2511.18793, section 4), or one context of the root per level
 * (level heads). Beams with one child need no logits. Beams with few children multiply only the
 * codes of these children, others all codes of the level at once. Cost: at most m C E operations,
 * and a few reads per child.
 */
#include "heap.h"
#include "trie.h"

#include <stdlib.h>

#define ROUNDING 1e-4f /* scores of dense candidates and beams are added in different orders */
#define SHARE 8 /* beams with at most 1 / SHARE of a level's codes as children multiply these */

typedef struct {
    const int64_t *ranks;
    int64_t count;
} Ranks;

/* Beam width, bound and filter of one request. */
typedef struct {
    int64_t width;         /* beam width */
    int64_t place;         /* rank (from 0) of the score that bounds it; -1: no bound */
    const Ranks *excluded; /* disjoint lists of ascending leaf ranks */
    int64_t num_excluded;
    int64_t all;           /* whether all leaves but the excluded are allowed; else those below */
    const uint32_t *words; /* bits of the base's leaves; NULL: none */
    const int32_t *counts; /* set bits before each word */
    Ranks added;           /* leaves that are allowed in addition to the bits */
} Request;

/* Items of the dense head that compete with the finished beams, [batch, count] each; count 0 means
 * none. */
typedef struct {
    int64_t count;
    const int64_t *rows;
    const char *valid;
    const float *scores, *share, *weights; /* share, weights [batch] */
    const float *dense;                    /* [batch, num_rows] */
    int64_t num_rows;
    const int32_t *leaf_rows; /* [items]; one of the two is set */
    const int64_t *wide_leaf_rows;
} DenseCandidates;

typedef struct {
    const Trie *trie;
    const Request *requests;
    const DenseCandidates *candidates;
    const Product *heads;     /* [levels] codes of each level */
    const char *const *codes; /* [levels] the same codes as rows, [codes, size] */
    int64_t type, size, levels, batch;
    int64_t level, until; /* first level, and the last level at most */
    int64_t stops;        /* whether to stop at the first level with a missing state */
    /* first beams: scores [batch, width], -inf where there is none; the nodes of each beam's
     * prefixes, with strides per request and per beam */
    int64_t width;
    const float *scores;
    const int64_t *first_paths;
    int64_t path_request, path_beam;
    /* known states: [batch, size] of the empty prefixes, [num_keys, size] of others */
    const char *last_hidden, *hidden;
    const int64_t *keys;
    int64_t num_keys;
    /* or contexts, with strides per request and per level. A recurrent head ([levels - 1] cells and
     * inputs) adds its own states to them. Level heads have no cells. */
    const Product *cells;
    const char *const *inputs;
    const char *contexts;
    int64_t next_request, next_level;
    /* results of the levels that the search passes, [levels + 1, batch, columns (, levels)]:
     * scores, -inf where there is no beam; the nodes of each beam's prefixes; KNOWN or MISSING
     * where a state is needed. used [levels + 1]: columns that hold a beam, at least 1. */
    int64_t columns;
    float *log_probs;
    int64_t *paths;
    char *scored;
    int64_t *used;
    float *lost; /* [batch] best score with a missing state; -inf: none */
} Search;

enum { UNNEEDED, KNOWN, MISSING };

/* Returns the number of set bits before a rank. */
INLINE int64_t before(const Request *request, int64_t rank) {
    uint32_t word = request->words[rank >> 5] & ((1u << (rank & 31)) - 1);
    return request->counts[rank >> 5] + __builtin_popcount(word);
}

INLINE int64_t listed(Ranks of, Leaves in) {
    return lower(of.ranks, of.count, in.last) - lower(of.ranks, of.count, in.first);
}

static int allowed(const Trie *trie, const Request *request, int64_t node) {
    if (request->all && !request->num_excluded) return 1;
    Leaves below = leaves(trie, node);
    int64_t left = request->all ? below.last - below.first : listed(request->added, below);
    if (request->words && node < trie->nodes)
        left += before(request, trie->last_leaf[node]) - before(request, trie->first_leaf[node]);
    for (int64_t i = 0; i < request->num_excluded && left > 0; i++)
        left -= listed(request->excluded[i], below);
    return left > 0;
}

/* Replaces the logits of a beam's children by their log-probabilities. */
static void normalise(float *logits, int64_t count) {
    int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < whole; i++) logits[i] = -INFINITY;
    floats peaks = load(FLOAT32, logits, 0), total = {};
    for (int64_t i = LANES; i < whole; i += LANES) {
        floats x = load(FLOAT32, logits, i);
        peaks = choose(x > peaks, x, peaks);
    }
    float peak = largest(peaks);
    for (int64_t i = 0; i < whole; i += LANES)
        total += exponential(load(FLOAT32, logits, i) - peak);
    float log_sum = logarithm(sum(total));
    for (int64_t i = 0; i < whole; i += LANES)
        store(FLOAT32, logits, i, (load(FLOAT32, logits, i) - peak) - log_sum);
}

INLINE float number(int type, const char *data, int64_t at) {
    if (type == FLOAT32) return ((const float *)data)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns whether a beam's children are few among the codes of their level. A state shorter than a
 * vector is multiplied by all codes just as fast. */
INLINE int are_few(const Search *s, int64_t level, Children below) {
    return s->size >= LANES && (below.count + below.more) * SHARE <= s->heads[level].size;
}

/* Adds the products of elements j .. j + count of a state with sixteen codes. */
INLINE void add_products(int type, const char *state, const char *const *codes, int64_t j,
                         int64_t count, floats *products) {
    floats x = load_some(type, state, j, count);
    UNROLL(16)
    for (int i = 0; i < LANES; i++) products[i] = mul_add(x, load_some(type, codes[i], j, count), products[i]);
}

/* Computes the logits of few children, in order, from their beam's state. */
INLINE void multiply(int type, const Search *s, const char *table, Children of, const char *state,
                     float *gains) {
    int64_t each = (type == FLOAT32 ? 4 : 2) * s->size, count = of.count + of.more;
    for (int64_t first = 0; first < count; first += LANES) {
        const char *codes[LANES];
        floats products[LANES] = {};
        int64_t j = 0;
        for (int64_t i = 0; i < LANES; i++) {
            int64_t number = first + i < count ? first + i : count - 1;
            codes[i] = table + last_code(s->trie, child(of, number)) * each;
        }
        for (; j + LANES <= s->size; j += LANES)
            add_products(type, state, codes, j, LANES, products);
        if (j < s->size) add_products(type, state, codes, j, s->size - j, products);
        store(FLOAT32, gains, first, rounded(type, sums(products)));
    }
}

/* Gathers the logits of many children, in order, from those of all codes. */
static void gather(const Search *s, Children of, const char *logits, float *gains) {
    const int32_t *codes = s->trie->codes + of.first;
    if (s->type == FLOAT32)
        for (int64_t i = 0; i < of.count; i++) gains[i] = ((const float *)logits)[codes[i]];
    else
        for (int64_t i = 0; i < of.count; i++) gains[i] = number(BFLOAT16, logits, codes[i]);
    for (int64_t i = of.count; i < of.count + of.more; i++)
        gains[i] = number(s->type, logits, last_code(s->trie, child(of, i)));
}

/* Working memory of a request's search. beams: of the current level. states: of the recurrent head,
 * for the beams with several items. rows: vectors to multiply with the codes. The first rows are
 * multiplied by all codes of a level, which gives `logits`; rows from the end on by few codes. */
typedef struct {
    int64_t count;
    Candidate *beams;
    int64_t *own, *above;    /* row of `states` of each beam, -1: none; the same of its parent */
    int64_t *codes, *turned; /* last code of each beam; new place of a row of `states` */
    int64_t *row;            /* row of `rows` of each beam, -1: none */
    char *states, *rows, *next, *logits;
    float *gains;
    Candidate *heap, *known;
} Work;

INLINE int64_t bytes_of(const Search *s) { return (s->type == FLOAT32 ? 4 : 2) * s->size; }

/* Computes the log-probabilities of a beam's children. slot -1: a single child, which has
 * probability 1. */
static void score_children(const Search *s, int64_t level, Children below, int64_t slot,
                           const Work *work) {
    const char *row = work->rows + slot * bytes_of(s), *codes = s->codes[level];
    work->gains[0] = 0.0f;
    if (slot < 0) return;
    if (!are_few(s, level, below))
        gather(s, below, work->logits + slot * (s->type == FLOAT32 ? 4 : 2) * s->heads[level].size,
               work->gains);
    else if (s->type == FLOAT32)
        multiply(FLOAT32, s, codes, below, row, work->gains);
    else
        multiply(BFLOAT16, s, codes, below, row, work->gains);
    normalise(work->gains, below.count + below.more);
}

/* Offers the children of one beam to the heap of candidates. */
static int64_t offer_children(const Search *s, const Request *request, Candidate beam,
                              Children below, const float *gains, Candidate *heap, int64_t size) {
    int64_t count = below.count + below.more;
    for (int64_t i = 0; i < count; i++) {
        float score = beam.score + gains[i] + 0.0f, least = heap[0].score;
        if (!(score > -INFINITY) || (size == request->width && score < least)) continue;
        Candidate one = {score, child(below, i), beam.parent};
        if (size == request->width && !better(one, heap[0])) continue;
        if (allowed(s->trie, request, one.node)) size = offer(heap, size, request->width, one);
    }
    return size;
}

static int among(const DenseCandidates *candidates, int64_t b, int64_t row) {
    int found = 0;
    for (int64_t i = b * candidates->count; i < (b + 1) * candidates->count; i++)
        found |= candidates->valid[i] & (candidates->rows[i] == row);
    return found;
}

/* Returns the score below which nothing enters the answer of request b. best: [size], best first.
 */
static float bound(const Search *s, int64_t b, const Candidate *best, int64_t size,
                   Candidate *known) {
    const DenseCandidates *candidates = s->candidates;
    int64_t most = s->requests[b].place + 1, count = 0;
    for (int64_t i = 0; i < candidates->count; i++) {
        Candidate one = {candidates->scores[b * candidates->count + i], i, 0};
        if (count < most || better(one, known[0])) count = offer(known, count, most, one);
    }
    for (int64_t i = 0; i < size; i++) {
        Leaves below = leaves(s->trie, best[i].node);
        if (below.last - below.first != 1) continue;
        Candidate one = {best[i].score, candidates->count + i, 0};
        if (candidates->count) {
            int64_t row = candidates->leaf_rows ? candidates->leaf_rows[below.first]
                                            : candidates->wide_leaf_rows[below.first];
            if (among(candidates, b, row)) continue;
            if (candidates->weights[b] != 0.0f)
                one.score += candidates->weights[b] * candidates->dense[b * candidates->num_rows + row];
        }
        if (count < most || better(one, known[0])) count = offer(known, count, most, one);
    }
    return count < most ? -INFINITY : known[0].score;
}

/* Returns how many of the best (best first) can still enter the answer. */
static int64_t of_use(const Search *s, int64_t b, const Candidate *best, int64_t size,
                      Candidate *known) {
    if (s->requests[b].place < 0) return size;
    float least = bound(s, b, best, size, known), share = 0.0f;
    if (s->candidates->count) {
        least -= ROUNDING;
        share = s->candidates->share[b];
    }
    while (size && best[size - 1].score + share < least) size--;
    return size;
}

/* tanh(input of the code + U times the previous state). */
static void activate(int type, const char *turned, const char *input, char *out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        floats x = load_some(type, turned, i, size - i) + load_some(type, input, i, size - i);
        x = choose(x > 10.0f, broadcast(10.0f), choose(x < -10.0f, broadcast(-10.0f), x));
        floats power = exponential(x + x);
        store_some(type, out, i, (power - 1.0f) / (power + 1.0f), size - i);
    }
}

INLINE int64_t place_of(const Search *s, int64_t level, int64_t b) {
    return (level * s->batch + b) * s->columns;
}

/* Steps the recurrent head by one code for each beam with a row in `own`. Beams with the same state
 * `above` share its product. */
static void step_states(const Search *s, int64_t level, Work *work) {
    int64_t each = bytes_of(s), count = 0;
    for (int64_t i = 0; i < s->columns; i++) work->turned[i] = -1;
    for (int64_t i = 0; i < work->count; i++) {
        int64_t above = work->above[i];
        if (work->own[i] < 0 || work->turned[above] >= 0) continue;
        memcpy(work->rows + count * each, work->states + above * each, each);
        work->turned[above] = count++;
    }
    linear(s->type, s->cells + level, work->rows, work->states, count);
    for (int64_t i = 0; i < work->count; i++)
        if (work->own[i] >= 0)
            activate(s->type, work->states + work->turned[work->above[i]] * each,
                     s->inputs[level] + work->codes[i] * each, work->next + work->own[i] * each,
                     s->size);
    char *before = work->states;
    work->states = work->next;
    work->next = before;
}

/* Clears the columns of a level of request b after its `count` beams. */
static void limit(const Search *s, int64_t level, int64_t b, int64_t count) {
    int64_t first = place_of(s, level, b), end = first + s->columns;
    memset(s->scored + first, UNNEEDED, s->columns);
    for (int64_t i = first + count; i < end; i++) {
        s->log_probs[i] = -INFINITY;
        for (int64_t l = 0; l < level; l++) s->paths[i * s->levels + l] = s->trie->any_leaf;
    }
}

/* Sets the first beams of a request, and the head's states at them. */
static void begin(const Search *s, int64_t b, Work *work) {
    int64_t each = bytes_of(s), first = place_of(s, s->level, b);
    limit(s, s->level, b, s->width);
    work->count = 0;
    for (int64_t w = 0; w < s->width; w++) {
        const int64_t *path = s->first_paths + b * s->path_request + w * s->path_beam;
        float score = s->scores[b * s->width + w];
        s->log_probs[first + w] = score;
        if (s->level)  // path is null at level 0, where memcpy is undefined
            memcpy(s->paths + (first + w) * s->levels, path, s->level * sizeof *path);
        if (score > -INFINITY)
            work->beams[work->count++] = (Candidate){score, s->level ? path[s->level - 1] : 0, w};
    }
    memset(work->own, 0, s->columns * sizeof *work->own);
    if (!s->cells) return;
    memcpy(work->states, s->last_hidden + b * each, each);
    for (int64_t level = 0; level < s->level; level++) {
        for (int64_t i = 0; i < work->count; i++) {
            int64_t node = s->paths[(first + work->beams[i].parent) * s->levels + level];
            work->above[i] = work->own[i];
            work->own[i] = i;
            work->codes[i] = last_code(s->trie, node);
        }
        step_states(s, level, work);
    }
}

/* Collects the rows of beams with several children, and computes logits where children are many.
 * Returns the number of missing states. */
static int64_t score(const Search *s, int64_t b, int64_t level, Work *work) {
    int64_t each = bytes_of(s), count = 0, few = s->columns, missing = 0;
    char *scored = s->scored + place_of(s, level, b);
    for (int64_t i = 0; i < work->count; i++) {
        Candidate *beam = work->beams + i;
        Children below = children(s->trie, beam->node);
        int64_t slot = s->cells ? work->own[i] : b;
        work->row[i] = -1;
        if (below.count + below.more < 2) continue;
        const char *state = (s->cells ? work->states : s->last_hidden) + slot * each;
        scored[beam->parent] = KNOWN;
        if (!s->contexts && level) {
            slot = find(s->keys, s->num_keys, b * s->trie->all_nodes + beam->node);
            if (slot < 0) {
                scored[beam->parent] = MISSING;
                if (beam->score > s->lost[b]) s->lost[b] = beam->score;
                missing++;
                beam->score = -INFINITY;
                continue;
            }
            state = s->hidden + slot * each;
        }
        work->row[i] = are_few(s, level, below) ? --few : count++;
        char *row = work->rows + work->row[i] * each;
        const char *context = s->contexts;
        if (context) context += (each / s->size) * (b * s->next_request + level * s->next_level);
        if (s->cells) {
            for (int64_t j = 0; j < s->size; j += LANES)
                store_some(s->type, row, j,
                           load_some(s->type, state, j, s->size - j) +
                               load_some(s->type, context, j, s->size - j),
                           s->size - j);
        } else {
            memcpy(row, context ? context : state, each);
        }
    }
    if (!missing || !s->stops) linear(s->type, s->heads + level, work->rows, work->logits, count);
    return missing;
}

/* Computes the beams of level `level + 1` of request b. */
static void deepen(const Search *s, int64_t b, int64_t level, Work *work) {
    const Request *request = s->requests + b;
    int64_t size = 0;
    for (int64_t i = 0; i < work->count; i++) {
        Candidate beam = work->beams[i];
        if (!(beam.score > -INFINITY)) continue;
        if (size == request->width && beam.score < work->heap[0].score) break; /* nor later */
        beam.parent = i;
        Children below = children(s->trie, beam.node);
        score_children(s, level, below, work->row[i], work);
        size = offer_children(s, request, beam, below, work->gains, work->heap, size);
    }
    best_first(work->heap, size);
    size = of_use(s, b, work->heap, size, work->known);
    int64_t at = place_of(s, level + 1, b), above = place_of(s, level, b);
    limit(s, level + 1, b, size);
    for (int64_t i = 0; i < size; i++) {
        Candidate *one = work->heap + i;
        int64_t *path = s->paths + (at + i) * s->levels;
        int64_t column = work->beams[one->parent].parent;
        memcpy(path, s->paths + (above + column) * s->levels, level * sizeof *path);
        path[level] = one->node;
        s->log_probs[at + i] = one->score;
        work->above[i] = work->own[one->parent];
    }
    for (int64_t i = 0; i < size; i++) {
        work->beams[i] = work->heap[i];
        work->beams[i].parent = i;
    }
    work->count = size;
}

/* Steps the recurrent head to the current level, for beams with several items. */
static void follow(const Search *s, int64_t level, Work *work) {
    int64_t count = 0;
    for (int64_t i = 0; i < work->count; i++) {
        Leaves below = leaves(s->trie, work->beams[i].node);
        work->own[i] = below.last - below.first > 1 ? count++ : -1;
        work->codes[i] = last_code(s->trie, work->beams[i].node);
    }
    step_states(s, level, work);
}

/* Searches for request b and returns the level that it reached. */
static int64_t search_one(const Search *s, int64_t b) {
    int64_t most = s->columns, each = bytes_of(s), codes = 0;
    for (int64_t l = 0; l < s->levels; l++)
        codes = s->heads[l].size > codes ? s->heads[l].size : codes;
    int64_t known = s->requests[b].place + 1;
    int64_t wide = (s->type == FLOAT32 ? 4 : 2) * codes;
    int64_t small = 3 * (most + 1) * sizeof(Candidate) + 5 * most * sizeof(int64_t);
    char *memory = malloc(small + known * sizeof(Candidate) + most * (3 * each + wide) +
                          (codes + LANES) * sizeof(float));
    Work work = {0};
    work.beams = (Candidate *)memory;
    work.heap = work.beams + most + 1;
    work.known = work.heap + most + 1;
    work.own = (int64_t *)(work.known + known);
    work.above = work.own + most;
    work.codes = work.above + most;
    work.turned = work.codes + most;
    work.row = work.turned + most;
    work.heap[0].score = -INFINITY;
    work.gains = (float *)(work.row + most);
    work.rows = (char *)(work.gains + codes + LANES);
    work.states = work.rows + most * each;
    work.next = work.states + most * each;
    work.logits = work.next + most * each;
    begin(s, b, &work);
    s->lost[b] = -INFINITY;
    int64_t level = s->level;
    for (; level < s->until; level++) {
        if (score(s, b, level, &work) && s->stops) break;
        deepen(s, b, level, &work);
        if (s->cells && level + 1 < s->levels) follow(s, level, &work);
#pragma omp critical(used)
        if (work.count > s->used[level + 1]) s->used[level + 1] = work.count;
    }
    free(memory);
    return level;
}

/* Returns the level that all requests reached. Threads share the requests, or the products of a
 * single one. A parallel region for one request, even with one thread, would make each product
 * start new threads. */
int64_t trie_search(const Search *s) {
    for (int64_t level = 0; level <= s->levels; level++) s->used[level] = 1;
    if (s->batch == 1) return search_one(s, 0);
    int64_t reached = s->until;
    PARALLEL_FOR(schedule(dynamic) reduction(min : reached))
    for (int64_t b = 0; b < s->batch; b++) {
        int64_t level = search_one(s, b);
        reached = level < reached ? level : reached;
    }
    return reached;
}
