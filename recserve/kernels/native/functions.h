/* The functions that Python calls, and their argument structs. */
#pragma once
#include "vectors.h"

/* One tree: `count` query rows that attend to the prefix and the tree. */
typedef struct {
    const int64_t *prefix;  /* [prefix_length] slots */
    int64_t prefix_length;
    const int64_t *slots;   /* [nodes] slots of its nodes */
    const int64_t *ends;    /* [nodes] packed index one past the subtree of each node */
    int64_t first, nodes;   /* packed index of its first node, and the number of nodes */
    const int64_t *queries; /* [count] packed nodes of its rows; NULL means all nodes */
    const int64_t *limits;  /* [packed nodes] prefix tokens that each node sees; NULL means all */
    int64_t row, count;     /* its first row among all computed nodes, and the number of rows */
} Tree;

/* What panels hold: pairs of bfloat16, or floats, as x has; float16 for float32 x; integers. */
enum { OWN_TYPE, FLOAT16, INT8 };

/* x W^T + b for rows x [inner]. panels: [ceil(size / PANEL), inner / each, PANEL, each], where each
 * is 2 for bfloat16 pairs, int8_depth() for integers, else 1. bias, scales: [ceil(size / PANEL) *
 * PANEL] float32; only INT8 has scales. */
typedef struct {
    const char *panels;
    const float *bias, *scales;
    int64_t inner, size, stored;
} Product;

/* Weights of a layer. query_norm, key_norm: [dim], or NULL without these norms. */
typedef struct {
    const char *attention_norm, *query_norm, *key_norm, *mlp_norm;
    Product qkv, output, gate_up, down;
} Layer;

typedef struct {
    int64_t size, heads, kv_heads, dim, inner;
    float eps, scale; /* scale: of the scores, dim^-1/2 as Python rounds it */
} Shape;

void rms_norm(int type, const char *x, const char *weight, char *out, int64_t rows, int64_t size,
              float eps);
void silu_mul(int type, const char *x, char *out, int64_t rows, int64_t size);
void rope_write(int type, const char *qkv, const float *cos, const float *sin, const int64_t *slots,
                char *keys, char *values, char *query, int64_t rows, int64_t heads,
                int64_t kv_heads, int64_t dim);
void linear(int type, const Product *weights, const char *x, char *out, int64_t rows);
void tree_attention(int type, const char *query, const char *keys, const char *values, char *out,
                    const Tree *trees, int64_t num_trees, int64_t heads, int64_t kv_heads,
                    int64_t dim, float scale, float normalizer, int together);
