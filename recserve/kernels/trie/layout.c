/* Token trees from sets of trie nodes, one tree per request (level_search.lay_out).
 *
 * The items below a node are a range of leaf ranks. So nodes sorted by the start of their range,
 * wider ranges first, are in preorder. A stack of open ranges holds the path to the current node.
 */
#include "trie.h"

#include <stdlib.h>

typedef struct {
    const Trie *trie;
    int64_t num_trees, num_keys;
    const int64_t *keys;   /* [num_keys] tree number * all_nodes + node; unsorted, some twice */
    const int64_t *tokens; /* [levels] first token of each level */
    /* nodes that were scored before: ascending keys, and their slots */
    const int64_t *scored_keys, *scored_slots;
    int64_t num_scored;
    /* results, [nodes] each, with capacity for num_keys; offsets [num_trees + 1] */
    int64_t *node_tokens, *parents, *depths, *ends, *offsets;
    int64_t *query_keys; /* [queries] keys of the nodes that were not scored before */
    int64_t num_queries;
    /* if some were: slots [nodes], -1 for the others; tokens and indices of the queries */
    int64_t *slots, *query_tokens, *queries;
} Layout;

typedef struct {
    int64_t tree, first, last, node;
} Range;

static int in_preorder(const void *one, const void *other) {
    const Range *a = one, *b = other;
    if (a->tree != b->tree) return a->tree < b->tree ? -1 : 1;
    if (a->first != b->first) return a->first < b->first ? -1 : 1;
    if (a->last != b->last) return a->last > b->last ? -1 : 1;
    return (a->node > b->node) - (a->node < b->node);
}

/* Builds the trees and returns the number of nodes. */
int64_t trie_layout(Layout *l) {
    const Trie *trie = l->trie;
    Range *ranges = malloc((l->num_keys + 1) * sizeof *ranges);
    for (int64_t i = 0; i < l->num_keys; i++) {
        int64_t tree = l->keys[i] / trie->all_nodes, node = l->keys[i] - tree * trie->all_nodes;
        Leaves below = leaves(trie, node);
        ranges[i] = (Range){tree, below.first, below.last, node};
    }
    qsort(ranges, l->num_keys, sizeof *ranges, in_preorder);
    int64_t count = 0, open = -1, trees = 0;
    l->num_queries = 0;
    for (int64_t i = 0; i < l->num_keys; i++) {
        Range *range = ranges + i;
        if (count && !in_preorder(range, ranges + count - 1)) continue;
        while (trees <= range->tree) l->offsets[trees++] = count;
        while (open >= 0 && (ranges[open].tree != range->tree || ranges[open].last <= range->first)) {
            l->ends[open] = count;
            open = l->parents[open];
        }
        int64_t key = range->tree * trie->all_nodes + range->node;
        int64_t at = find(l->scored_keys, l->num_scored, key);
        l->parents[count] = open;
        l->depths[count] = open < 0 ? 0 : l->depths[open] + 1;
        l->node_tokens[count] = l->tokens[l->depths[count]] + last_code(trie, range->node);
        if (l->num_scored) l->slots[count] = at < 0 ? -1 : l->scored_slots[at];
        if (at < 0) {
            if (l->num_scored) {
                l->queries[l->num_queries] = count;
                l->query_tokens[l->num_queries] = l->node_tokens[count];
            }
            l->query_keys[l->num_queries++] = key;
        }
        ranges[count] = *range;
        open = count++;
    }
    for (; open >= 0; open = l->parents[open]) l->ends[open] = count;
    while (trees <= l->num_trees) l->offsets[trees++] = count;
    free(ranges);
    return count;
}

enum { ALIVE, FORKED, OPEN }; /* beams to score: with a child, several children, several items */

typedef struct {
    const Trie *trie;
    int64_t batch, columns, level, which;
    const float *log_probs; /* [batch, columns], -inf where there is no beam */
    const int64_t *paths;   /* nodes of each beam's prefixes; strides follow */
    int64_t path_request, path_beam;
    const int64_t *scored_keys;   /* ascending */
    int64_t num_scored;
    const int64_t *below; /* [batch] number of prefixes below the beams to score as well */
    int64_t *keys;        /* result: capacity for every path and all of `below` */
} Wanted;

INLINE int64_t items(const Trie *trie, int64_t node) {
    Leaves below = leaves(trie, node);
    return below.last - below.first;
}

static int is_wanted(const Wanted *w, int64_t b, int64_t node) {
    Children below = children(w->trie, node);
    if (w->which == FORKED && below.count + below.more < 2) return 0;
    if (w->which == OPEN && items(w->trie, node) < 2) return 0;
    return find(w->scored_keys, w->num_scored, b * w->trie->all_nodes + node) < 0;
}

/* Finds up to `most` prefixes below a node that have several items, shorter ones first. */
static int64_t prefixes_below(const Wanted *w, int64_t b, int64_t node, int64_t most,
                              int64_t *keys) {
    int64_t count = 0, first = b * w->trie->all_nodes;
    for (int64_t next = -1; next < count && count < most; next++) {
        Children below = children(w->trie, next < 0 ? node : keys[next] - first);
        for (int64_t i = 0; i < below.count + below.more && count < most; i++) {
            int64_t found = child(below, i);
            if (items(w->trie, found) >= 2) keys[count++] = first + found;
        }
    }
    return count;
}

/* Writes the keys of the selected beams that are not scored, each with all nodes above it, and of
 * prefixes below them, those of better beams first. Returns their number. */
int64_t wanted_prefixes(const Wanted *w) {
    int64_t count = 0;
    for (int64_t b = 0; b < w->batch; b++) {
        int64_t left = w->below[b];
        for (int64_t i = 0; i < w->columns; i++) {
            const int64_t *path = w->paths + b * w->path_request + i * w->path_beam;
            int64_t node = w->level ? path[w->level - 1] : 0;
            if (!(w->log_probs[b * w->columns + i] > -INFINITY) || !is_wanted(w, b, node)) continue;
            for (int64_t l = 0; l < w->level; l++)
                w->keys[count++] = b * w->trie->all_nodes + path[l];
            int64_t more = prefixes_below(w, b, node, left, w->keys + count);
            count += more;
            left -= more;
        }
    }
    return count;
}

/* Beams that a search passed (search.c), from level `first` to before `last`. */
typedef struct {
    int64_t all_nodes, batch, columns, levels, first, last;
    const float *log_probs;
    const int64_t *paths;
    const char *scored;
    int64_t which;       /* value of `scored` to select; -1: any */
    const float *floors; /* [batch] beams with lower scores are left out */
    int64_t *keys;       /* result */
} Passed;

/* Writes the keys of the selected beams, each with all nodes above it. Returns their number. */
int64_t passed_prefixes(const Passed *p) {
    int64_t count = 0, each = p->batch * p->columns;
    for (int64_t level = p->first; level < p->last; level++)
        for (int64_t i = level * each; i < (level + 1) * each; i++) {
            int64_t b = (i - level * each) / p->columns;
            if (!(p->log_probs[i] > -INFINITY) || p->log_probs[i] < p->floors[b]) continue;
            if (p->which >= 0 && p->scored[i] != p->which) continue;
            for (int64_t l = 0; l < level; l++)
                p->keys[count++] = b * p->all_nodes + p->paths[i * p->levels + l];
        }
    return count;
}
