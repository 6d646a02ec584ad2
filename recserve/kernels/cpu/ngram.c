/* Prompt lookup: what followed when the text ended like this before (draft/ngram.py). */
#include "draft_tree.h"

#include <stdlib.h>

/* What followed `end`, going on in itself where the text is over, until the tree is full. Returns
 * whether it grew. */
static int add_continuation(DraftTree *tree, const Ask *ask, int64_t end) {
    const TextIndex *text = ask->text;
    int64_t known = text->stop - 1 - end;
    int32_t node = 0, size = tree->size;
    for (int64_t i = 0; i < ask->depth; i++) {
        int64_t token = token_at(text, end + 1 + i % known);
        node = child_with(tree, node, token, 0, ask->num_nodes);
        if (!node) break;
        tree->nodes[node].place = KEPT;
    }
    return tree->size > size;
}

/* Continuations of the longest matches first, of equal ones the newest. */
static void continue_text(DraftTree *tree, const Ask *ask, int64_t looked_at) {
    const TextIndex *text = ask->text;
    const int64_t *last = text->tokens + text->stop - 1;
    int64_t used = 0;
    for (int64_t k = text->num_lengths - 1; k >= 0; k--) {
        int64_t length = text->lengths[k], left = looked_at * ask->branches;
        if (length > text->known) continue;
        for (int64_t end = *before(text, k, text->stop - 1) - 1; end >= 0 && left;
             end = *before(text, k, end) - 1) {
            if (alike(text, end, last, length) < length) continue;
            used += add_continuation(tree, ask, end);
            if (used == ask->branches) return;
            left--;
        }
    }
}

/* looked_at: occurrences, for each branch that is wanted. Returns how many nodes there are. */
int64_t ngram_drafts(const Drafts *drafts, int64_t looked_at) {
    int64_t most = 0, count = 0;
    for (int64_t i = 0; i < drafts->num_asks; i++)
        if (drafts->asks[i].num_nodes > most) most = drafts->asks[i].num_nodes;
    DraftTree tree = {malloc((most + 1) * sizeof *tree.nodes), 0};
    const int64_t *new_tokens = drafts->new_tokens;
    for (int64_t i = 0; i < drafts->num_asks; i++) {
        const Ask *ask = drafts->asks + i;
        int64_t *shape = drafts->shapes + 2 * i;
        extend_text(ask->text, new_tokens, ask->num_new);
        new_tokens += ask->num_new;
        clear_tree(&tree);
        if (ask->depth) continue_text(&tree, ask, looked_at);
        shape[0] = lay_out(&tree, drafts->tokens + count, drafts->parents + count, shape + 1);
        count += shape[0];
    }
    free(tree.nodes);
    return count;
}
