/* Decoder layers in one call, for few rows, where operator calls take longer than the work between
 * two products. Every step is a function of its own file and gives the same bits. */
#include "functions.h"

INLINE void add(int type, char *x, const char *other, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        floats sum = load_some(type, x, i, size - i) + load_some(type, other, i, size - i);
        store_some(type, x, i, sum, size - i);
    }
}

/* Normalises queries or keys of every row of qkv, head by head. */
static void norm_heads(int type, char *x, const char *weight, int64_t rows, int64_t stride,
                       int64_t heads, int64_t dim, float eps) {
    int64_t bytes = type == FLOAT32 ? 4 : 2;
    for (int64_t r = 0; r < rows; r++)
        rms_norm(type, x + r * stride * bytes, weight, x + r * stride * bytes, heads, dim, eps);
}

/* Runs x [rows, size] in place through `count` layers, and through `norm` if it is not NULL. cos,
 * sin, slots: as for rope_write. keys, values: of the first layer; layers are `pool` elements
 * apart. trees: as for tree_attention. scratch: LayerShape.scratch elements per row. */
void decoder_layers(int type, const Layer *layers, int64_t count, const Shape *shape, char *x,
                    int64_t rows, const float *cos, const float *sin, const int64_t *slots,
                    char *keys, char *values, int64_t pool, const Tree *trees, int64_t num_trees,
                    int together, const char *norm, char *scratch) {
    int64_t bytes = type == FLOAT32 ? 4 : 2, dim = shape->dim, all = shape->heads * dim;
    int64_t wide = all + 2 * shape->kv_heads * dim;
    float eps = shape->eps;
    char *normed = scratch, *qkv = normed + rows * shape->size * bytes;
    char *query = qkv + rows * wide * bytes, *mixed = query + rows * all * bytes;
    char *gate_up = mixed + rows * all * bytes, *gated = gate_up + rows * 2 * shape->inner * bytes;
    for (int64_t i = 0; i < count; i++, keys += pool * bytes, values += pool * bytes) {
        const Layer *layer = layers + i;
        rms_norm(type, x, layer->attention_norm, normed, rows, shape->size, eps);
        linear(type, &layer->qkv, normed, qkv, rows);
        if (layer->query_norm) {
            norm_heads(type, qkv, layer->query_norm, rows, wide, shape->heads, dim, eps);
            norm_heads(type, qkv + all * bytes, layer->key_norm, rows, wide, shape->kv_heads, dim,
                       eps);
        }
        rope_write(type, qkv, cos, sin, slots, keys, values, query, rows, shape->heads,
                   shape->kv_heads, dim);
        tree_attention(type, query, keys, values, mixed, trees, num_trees, shape->heads,
                       shape->kv_heads, dim, shape->scale, 0, together);
        linear(type, &layer->output, mixed, normed, rows);
        add(type, x, normed, rows * shape->size);
        rms_norm(type, x, layer->mlp_norm, normed, rows, shape->size, eps);
        linear(type, &layer->gate_up, normed, gate_up, rows);
        silu_mul(type, gate_up, gated, rows, shape->inner);
        linear(type, &layer->down, gated, normed, rows);
        add(type, x, normed, rows * shape->size);
    }
    if (norm) rms_norm(type, x, norm, x, rows, shape->size, eps);
}
