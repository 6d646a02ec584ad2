/* Suffix decoding: what followed the end of a text before, by how often it did (speculation/drafters/suffix.py).
 *
 * The occurrences of the end are looked up once, those that match long come first; each adds what
 * followed it to one tree of counts, which is judged whenever all of a match length are in it.
 */
#include "draft_tree.h"

#include <stdlib.h>

enum { MET = 512 };

typedef struct {
    const TextIndex *store; /* of other texts' outputs, or NULL */
    int64_t max_match, occurrences;
    double min_prob;
    const int64_t *rooms; /* [max_match + 1] most nodes that a match so long may draft */
} Suffixes;

/* end: of an occurrence; next: another one that matches as long, or -1. */
typedef struct {
    int64_t end, next;
} Occurrence;

typedef struct {
    DraftTree tree;
    Occurrence *found;
    int64_t *of_match; /* [max_match + 1] the first found that matches so long, or -1 */
    int64_t *oldest;   /* [num_lengths] of those that an n-gram found */
    int64_t met[MET];  /* ends that were compared lately, each in the place of its last digits */
    int32_t *chosen, *best;
} Scratch;

/* How much of the text's end may be looked for in an index. */
static int64_t searched(const Suffixes *s, const TextIndex *text, const TextIndex *in) {
    return in == text || text->known < s->max_match ? text->known : s->max_match;
}

/* Whether a longer n-gram found the occurrence already: it finds all that it matches, the newest
 * first. */
static int found_already(const TextIndex *in, const Scratch *scratch, int64_t which, int64_t end,
                         int64_t same) {
    for (int64_t k = which + 1; k < in->num_lengths; k++)
        if (same >= in->lengths[k] && end >= scratch->oldest[k]) return 1;
    return 0;
}

/* Occurrences of the text's end in an index that are followed by a token, by how long they match.
 */
static void find(const Suffixes *s, const TextIndex *text, const TextIndex *in, Scratch *scratch) {
    const int64_t *last = text->tokens + text->stop - 1;
    int64_t longest = in->lengths[in->num_lengths - 1], from = start(in), count = 0;
    int64_t most = s->max_match > longest ? s->max_match : longest;
    if (most > text->known) most = text->known;
    for (int64_t m = 0; m <= s->max_match; m++) scratch->of_match[m] = -1;
    for (int64_t i = 0; i < MET; i++) scratch->met[i] = -1;
    for (int64_t k = in->num_lengths - 1; k >= 0; k--) {
        int64_t length = in->lengths[k], left = s->occurrences;
        scratch->oldest[k] = INT64_MAX;
        if (length > searched(s, text, in)) continue;
        uint64_t hash = 0;
        for (int64_t i = 0; i < length; i++) hash = joined(hash, last[-i]);
        int64_t end = *head(in, k, hash) - 1;
        if (in == text) end = *before(in, k, end) - 1;
        for (; end >= from && left; end = *before(in, k, end) - 1) {
            int64_t *met = scratch->met + end % MET;
            int found = *met == end;
            int64_t same = found ? length : alike(in, end, last, most), match = end - from + 1;
            if (same < length) continue;
            left--;
            found = found || found_already(in, scratch, k, end, same);
            *met = scratch->oldest[k] = end;
            if (found || end + 1 == in->stop || token_at(in, end + 1) < 0) continue;
            if (match > same) match = same;
            if (match > s->max_match) match = s->max_match;
            scratch->found[count] = (Occurrence){end, scratch->of_match[match]};
            scratch->of_match[match] = count++;
        }
    }
}

/* One more of what followed. */
static void count_path(DraftTree *tree, const TextIndex *in, int64_t end, int64_t depth) {
    int32_t node = 0;
    tree->nodes[0].count++;
    for (int64_t i = end + 1; i < in->stop && i <= end + depth && token_at(in, i) >= 0; i++) {
        node = child_with(tree, node, token_at(in, i), 1, INT32_MAX);
        tree->nodes[node].count++;
    }
}

static double share(const DraftTree *tree, int32_t node) {
    return (double)tree->nodes[node].count / tree->nodes[0].count;
}

/* The likeliest `room` nodes, best first, of equals the first in preorder: shares fall along a path,
 * so that parents come first. */
static int64_t likeliest(const DraftTree *tree, int64_t room, double min_prob, int32_t *chosen) {
    const DraftNode *nodes = tree->nodes;
    int64_t size = 0;
    for (int32_t node = nodes[0].child; node && room;) {
        int32_t count = nodes[node].count;
        int fits = (size < room || count > nodes[chosen[size - 1]].count) &&
                   share(tree, node) >= min_prob;
        if (fits) {
            int64_t at = size < room ? size++ : size - 1;
            for (; at && nodes[chosen[at - 1]].count < count; at--) chosen[at] = chosen[at - 1];
            chosen[at] = node;
        }
        node = next_node(tree, node, fits);
    }
    return size;
}

/* From the root always to the child of the largest share, the first of equals. */
static int64_t heaviest_chain(const DraftTree *tree, int64_t room, double min_prob,
                              int32_t *chosen) {
    const DraftNode *nodes = tree->nodes;
    int64_t size = 0;
    for (int32_t node = 0; size < room;) {
        int32_t best = nodes[node].child;
        for (int32_t other = best; other; other = nodes[other].sibling)
            if (nodes[other].count > nodes[best].count) best = other;
        if (!best || share(tree, best) < min_prob) break;
        chosen[size++] = node = best;
    }
    return size;
}

/* Draft what an index knows where its expected accept length is above `score`; returns the higher.
 */
static double guess(const Suffixes *s, const Ask *ask, const TextIndex *in, double score,
                    Scratch *scratch, int64_t *tokens, int64_t *parents, int64_t *shape) {
    DraftTree *tree = &scratch->tree;
    int64_t kept = 0;
    find(s, ask->text, in, scratch);
    clear_tree(tree);
    for (int64_t m = s->max_match; m > 0; m--) {
        if (scratch->of_match[m] < 0) continue;
        for (int64_t i = scratch->of_match[m]; i >= 0; i = scratch->found[i].next)
            count_path(tree, in, scratch->found[i].end, ask->depth);
        int64_t room = s->rooms[m] < ask->num_nodes ? s->rooms[m] : ask->num_nodes, total = 0;
        int64_t size = (ask->branches == 1 ? heaviest_chain : likeliest)(tree, room, s->min_prob,
                                                                         scratch->chosen);
        for (int64_t i = 0; i < size; i++) total += tree->nodes[scratch->chosen[i]].count;
        /* Whole counts, so that equal scores are equal and the longer match wins. */
        double expected = (double)total / tree->nodes[0].count;
        if (expected <= score) continue;
        score = expected, kept = size;
        int32_t *best = scratch->chosen;
        scratch->chosen = scratch->best, scratch->best = best;
    }
    for (int64_t i = 0; i < kept; i++) tree->nodes[scratch->best[i]].place = KEPT;
    if (kept) shape[0] = lay_out(tree, tokens, parents, shape + 1);
    return score;
}

static Scratch scratch_for(const Suffixes *s, const Ask *asks, int64_t num_asks) {
    int64_t nodes = 0, depth = 0, lengths = 0;
    for (const Ask *ask = asks; ask < asks + num_asks; ask++) {
        if (ask->num_nodes > nodes) nodes = ask->num_nodes;
        if (ask->depth > depth) depth = ask->depth;
        lengths = ask->text->num_lengths;
    }
    int64_t found = s->occurrences * lengths;
    return (Scratch){.tree = {malloc((found * depth + 1) * sizeof(DraftNode)), 0},
                     .found = malloc(found * sizeof(Occurrence)),
                     .of_match = malloc((s->max_match + 1) * sizeof(int64_t)),
                     .oldest = malloc(lengths * sizeof(int64_t)),
                     .chosen = malloc(nodes * sizeof(int32_t)),
                     .best = malloc(nodes * sizeof(int32_t))};
}

/* The better of what a text itself and the store let expect, the text's own at a tie. */
void suffix_drafts(const Ask *asks, int64_t num_asks, const int64_t *new_tokens, int64_t *tokens,
                   int64_t *parents, int64_t *shapes, const Suffixes *s) {
    Scratch scratch = scratch_for(s, asks, num_asks);
    for (const Ask *ask = asks; ask < asks + num_asks; ask++, shapes += 2) {
        extend_text(ask->text, new_tokens, ask->num_new);
        new_tokens += ask->num_new;
        shapes[0] = shapes[1] = 0;
        if (!ask->depth) continue;
        double score = guess(s, ask, ask->text, 0, &scratch, tokens, parents, shapes);
        if (s->store && s->store->stop)
            guess(s, ask, s->store, score, &scratch, tokens, parents, shapes);
        tokens += shapes[0], parents += shapes[0];
    }
    free(scratch.tree.nodes), free(scratch.found), free(scratch.of_match), free(scratch.oldest);
    free(scratch.chosen), free(scratch.best);
}
