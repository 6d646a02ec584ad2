/* Operations on each row between a layer's products: norm, RoPE with the write to the pool, gate.
 *
 * Elements after the last whole vector use the same instructions as the rest. So a row's bits
 * depend on the row alone, not on its position or the number of rows. Bytes moved: inputs once (a
 * norm's row twice, from the nearest cache), outputs once.
 */
#include "functions.h"

#define MANY 65536 /* threads share the rows of at least so many elements */

/* x / rms(x) * weight */
INLINE void normalize(int type, const char *x, const char *weight, char *out, int64_t size,
                      float eps) {
    floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        floats v = load_some(type, x, i, size - i);
        squares = mul_add(v, v, squares);
    }
    float scale = 1.0f / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES) {
        floats v = load_some(type, x, i, size - i) * scale;
        store_some(type, out, i, v * load_some(type, weight, i, size - i), size - i);
    }
}

/* silu(gate) * up of a row [gate | up]. SiLU is rounded to the type first, as in torch. */
INLINE void gate(int type, const char *x, char *out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        floats g = load_some(type, x, i, size - i), up = load_some(type, x, size + i, size - i);
        floats e = exponential(choose(g < -87.0f, broadcast(87.0f), -g));
        char silu[4 * LANES];
        store(type, silu, 0, g / (e + 1.0f));
        store_some(type, out, i, load(type, silu, 0) * up, size - i);
    }
}

/* Rotates one head's pairs (i, half + i). */
INLINE void turn(int type, const char *from, char *to, const float *cos, const float *sin,
                 int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        floats low = load(type, from, i), high = load(type, from, half + i);
        floats c = load(FLOAT32, cos, i), s = load(FLOAT32, sin, i);
        store(type, to, i, low * c - high * s);
        store(type, to, half + i, high * c + low * s);
    }
}

/* Rotates a row's queries, rotates and writes its keys, and writes its values. qkv: [queries | keys
 * | values]. */
INLINE void rotate(int type, const char *qkv, const float *cos, const float *sin, char *key,
                   char *value, char *query, int64_t heads, int64_t kv_heads, int64_t dim) {
    int64_t size = dim * (type == FLOAT32 ? 4 : 2);
    for (int64_t h = 0; h < heads; h++, qkv += size)
        turn(type, qkv, query + h * size, cos, sin, dim / 2);
    for (int64_t h = 0; h < kv_heads; h++, qkv += size)
        turn(type, qkv, key + h * size, cos, sin, dim / 2);
    memcpy(value, qkv, kv_heads * size);
}

/* x, out: [rows, size]. weight: [size]. */
void rms_norm(int type, const char *x, const char *weight, char *out, int64_t rows, int64_t size,
              float eps) {
    PARALLEL_FOR(schedule(static) if (rows * size >= MANY))
    for (int64_t r = 0; r < rows; r++)
        if (type == FLOAT32)
            normalize(FLOAT32, x + r * size * 4, weight, out + r * size * 4, size, eps);
        else
            normalize(BFLOAT16, x + r * size * 2, weight, out + r * size * 2, size, eps);
}

/* x: [rows, 2 * size]. out: [rows, size]. */
void silu_mul(int type, const char *x, char *out, int64_t rows, int64_t size) {
    PARALLEL_FOR(schedule(static) if (rows * size >= MANY))
    for (int64_t r = 0; r < rows; r++)
        if (type == FLOAT32)
            gate(FLOAT32, x + r * size * 8, out + r * size * 4, size);
        else
            gate(BFLOAT16, x + r * size * 4, out + r * size * 2, size);
}

/* qkv: [rows, heads + 2 kv_heads, dim]. cos, sin: [rows, dim / 2]. slots: [rows]. keys, values:
 * [.., kv_heads, dim]. query: [rows, heads, dim]. dim / 2 is a multiple of LANES. */
void rope_write(int type, const char *qkv, const float *cos, const float *sin, const int64_t *slots,
                char *keys, char *values, char *query, int64_t rows, int64_t heads,
                int64_t kv_heads, int64_t dim) {
    int64_t size = dim * (type == FLOAT32 ? 4 : 2);
    PARALLEL_FOR(schedule(static) if (rows * heads * dim >= MANY))
    for (int64_t r = 0; r < rows; r++) {
        const char *row = qkv + r * (heads + 2 * kv_heads) * size;
        const float *c = cos + r * dim / 2, *s = sin + r * dim / 2;
        char *key = keys + slots[r] * kv_heads * size, *value = values + slots[r] * kv_heads * size;
        if (type == FLOAT32)
            rotate(FLOAT32, row, c, s, key, value, query + r * heads * size, heads, kv_heads, dim);
        else
            rotate(BFLOAT16, row, c, s, key, value, query + r * heads * size, heads, kv_heads, dim);
    }
}
