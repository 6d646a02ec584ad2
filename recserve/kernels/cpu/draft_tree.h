/* A draft that grows path by path, and what is asked for when one is wanted. */
#pragma once
#include "text_index.h"

/* Of one text: how many tokens are new to it, and what its draft may be. Drafts are found one behind
 * the other: tokens, parents in the draft (-1: none) in preorder, and shapes [texts, 2], how many
 * nodes and levels each has. */
typedef struct {
    TextIndex *text;
    int64_t num_new, num_nodes, depth;
    int64_t branches; /* most continuations that are merged; 1: no forks */
} Ask;

/* Node 0 stands for the text's last token. child, sibling: 0 for none. place: in the draft. */
typedef struct {
    int64_t token;
    int32_t count, depth, parent, child, sibling, place;
} DraftNode;

typedef struct {
    DraftNode *nodes;
    int32_t size;
} DraftTree;

enum { LEFT_OUT = -2, ROOT = -1, KEPT = 0 }; /* place of a node before there is a draft */

INLINE void clear_tree(DraftTree *tree) {
    tree->nodes[0] = (DraftNode){.place = ROOT};
    tree->size = 1;
}

/* The child of a node that carries the token, a new one if there is none: among its siblings by
 * token, or behind them. 0 where the tree has `most` nodes already. */
INLINE int32_t child_with(DraftTree *tree, int32_t parent, int64_t token, int by_token,
                          int64_t most) {
    DraftNode *nodes = tree->nodes;
    int32_t *link = &nodes[parent].child;
    while (*link && (by_token ? nodes[*link].token < token : nodes[*link].token != token))
        link = &nodes[*link].sibling;
    if (*link && nodes[*link].token == token) return *link;
    if (tree->size > most) return 0;
    int32_t made = tree->size++;
    nodes[made] = (DraftNode){token, 0, nodes[parent].depth + 1, parent, 0, *link, LEFT_OUT};
    return *link = made;
}

/* The next node in preorder, below this one only where `into`; 0 behind the last. */
INLINE int32_t next_node(const DraftTree *tree, int32_t node, int into) {
    const DraftNode *nodes = tree->nodes;
    if (into && nodes[node].child) return nodes[node].child;
    while (node && !nodes[node].sibling) node = nodes[node].parent;
    return node ? nodes[node].sibling : 0;
}

/* The nodes that are kept, with all above each. Returns how many; `levels`: how deep they are. */
INLINE int64_t lay_out(DraftTree *tree, int64_t *tokens, int64_t *parents, int64_t *levels) {
    int64_t count = 0;
    *levels = 0;
    for (int32_t at = tree->nodes[0].child; at;) {
        DraftNode *node = tree->nodes + at;
        int kept = node->place != LEFT_OUT;
        if (kept) {
            tokens[count] = node->token;
            parents[count] = tree->nodes[node->parent].place;
            node->place = count++;
            if (node->depth > *levels) *levels = node->depth;
        }
        at = next_node(tree, at, kept);
    }
    return count;
}
