/* Prompt lookup: what followed when the text ended like this before (speculation/drafters/ngram.py). */
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

/* looked_at: occurrences, for each branch that is wanted. */
void ngram_drafts(const Ask *asks, int64_t num_asks, const int64_t *new_tokens, int64_t *tokens,
                  int64_t *parents, int64_t *shapes, int64_t looked_at) {
    int64_t most = 0;
    for (int64_t i = 0; i < num_asks; i++)
        if (asks[i].num_nodes > most) most = asks[i].num_nodes;
    DraftTree tree = {malloc((most + 1) * sizeof *tree.nodes), 0};
    for (const Ask *ask = asks; ask < asks + num_asks; ask++, shapes += 2) {
        extend_text(ask->text, new_tokens, ask->num_new);
        new_tokens += ask->num_new;
        clear_tree(&tree);
        if (ask->depth) continue_text(&tree, ask, looked_at);
        shapes[0] = lay_out(&tree, tokens, parents, shapes + 1);
        tokens += shapes[0], parents += shapes[0];
    }
    free(tree.nodes);
}
