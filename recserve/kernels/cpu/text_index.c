/* A text grows (text_index.h). */
#include "text_index.h"

static void append(TextIndex *text, int64_t token) {
    int64_t position = text->stop++, taken = 0;
    text->tokens[position & (text->size - 1)] = token;
    text->known = token < 0 ? 0 : text->known + 1;
    uint64_t hash = 0;
    for (int64_t k = 0; k < text->num_lengths && text->lengths[k] <= text->known; k++) {
        for (; taken < text->lengths[k]; taken++)
            hash = joined(hash, token_at(text, position - taken));
        int64_t *newest = head(text, k, hash);
        *before(text, k, position) = *newest;
        *newest = position + 1;
    }
}

/* There must be a slot for every token that is kept. */
void extend_text(TextIndex *text, const int64_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) append(text, tokens[i]);
}
