/* Compares products, attention, norms and gates of the C sources with plain loops in double.
 *
 *     self_test          prints the number of comparisons; the exit status is 1 if one fails
 *     self_test wrong    shifts every expected value, so that every kernel must fail
 *
 * It is for machines without Python, such as an emulator. The arguments are fixed random numbers.
 */
#include "functions.h"
#include <stdio.h>
#include <stdlib.h>

#define PANEL 64
int int8_depth(int type, int64_t inner);

static int64_t compared, failed;
static double shift;
static const char *last; /* the kernel whose failure was printed last */
static uint64_t state = 1;

static double drawn(void) { /* uniform in [-1, 1) */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 33) / (1u << 30) - 1;
}

static int64_t below(int64_t limit) { return (int64_t)((drawn() + 1) / 2 * limit); }

static size_t size_of(int type) { return type == FLOAT32 ? 4 : 2; }
static double eps_of(int type) { return type == FLOAT32 ? 1.2e-7 : 7.8e-3; }

static double get(int type, const void *data, int64_t at) {
    if (type == FLOAT32) return ((const float *)data)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void put(int type, void *data, int64_t at, float x) {
    if (type == FLOAT32) {
        ((float *)data)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    ((uint16_t *)data)[at] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void *numbers(int type, int64_t count) {
    void *data = calloc(count + 1, size_of(type));
    for (int64_t i = 0; i < count; i++) put(type, data, i, (float)drawn());
    return data;
}

static void compare(const char *what, int type, double got, double expected, double near) {
    compared++;
    if (fabs(got - expected - shift) <= near) return;
    failed++;
    if (what != last)
        fprintf(stderr, "%s, type %d: %.9g, expected %.9g within %.2g\n", what, type, got,
                expected + shift, near);
    last = what;
}

/* A row alone must have the bits that it has in company. */
static void same_bits(const char *what, const void *row, const void *alone, size_t bytes) {
    compared++;
    if (memcmp(row, alone, bytes)) {
        failed++;
        fprintf(stderr, "%s: a row alone has other bits\n", what);
    }
}


/* float16 in 1, 5 and 10 bits. All numbers of `bits` are finite. */
static double from_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

static void check_products(int type, int64_t rows, int64_t inner, int64_t size, int how) {
    int is_int8 = how == INT8;
    int64_t each = is_int8 ? int8_depth(type, inner) : how == FLOAT16 ? 1 : 4 / (int64_t)size_of(type);
    int64_t steps = inner / each, padded = (size + PANEL - 1) / PANEL * PANEL;
    char *x = numbers(type, rows * inner), *weight = numbers(type, size * inner);
    int8_t *integers = calloc(padded * inner, 1);
    uint16_t *halves = calloc(size * inner, sizeof *halves);
    char *panels = calloc(padded * inner, is_int8 ? 1 : how == FLOAT16 ? 2 : size_of(type));
    float *bias = numbers(FLOAT32, padded), *scales = numbers(FLOAT32, padded);
    for (int64_t n = 0; n < size; n++)
        for (int64_t k = 0; k < inner; k++) {
            int64_t at = ((n / PANEL * steps + k / each) * PANEL + n % PANEL) * each + k % each;
            integers[n * inner + k] = below(255) - 127;
            /* any sign and fraction; sizes up to 8, zeros and subnormal numbers among them */
            halves[n * inner + k] = below(2) << 15 | below(19) << 10 | below(1024);
            if (how == FLOAT16)
                ((uint16_t *)panels)[at] = halves[n * inner + k];
            else if (is_int8)
                panels[at] = integers[n * inner + k];
            else
                put(type, panels, at, get(type, weight, n * inner + k));
        }
    char *out = calloc(rows * size, size_of(type)), *alone = calloc(size, size_of(type));
    for (int64_t r = -1; r < rows; r++) {
        int64_t from = r < 0 ? 0 : r, count = r < 0 ? rows : 1;
        char *to = r < 0 ? out : alone;
        const char *row = x + from * inner * size_of(type);
        linear(type, &(Product){panels, bias, scales, inner, size, how}, row, to, count);
        if (r >= 0) same_bits("product", out + r * size * size_of(type), alone, size * size_of(type));
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < size; n++) {
            double expected = 0, most = fabs(bias[n]);
            for (int64_t k = 0; k < inner; k++) {
                double w = is_int8         ? integers[n * inner + k] * (double)scales[n]
                           : how == FLOAT16 ? from_half(halves[n * inner + k])
                                           : get(type, weight, n * inner + k);
                expected += get(type, x, r * inner + k) * w;
                most += fabs(get(type, x, r * inner + k) * w);
            }
            expected += bias[n];
            double near = eps_of(type) * fabs(expected) + 4e-7 * most;
            compare(is_int8 ? "int8 product" : how == FLOAT16 ? "half product" : "product", type, get(type, out, r * size + n),
                    expected, near);
        }
    free(x), free(weight), free(integers), free(halves), free(panels), free(bias), free(scales);
    free(out), free(alone);
}

/* nodes: of one tree in preorder. wide: up to so many children per node; 1 makes a chain.
 * normalizer: 0 for softmax, else the divisor of SiLU. limited: whether nodes see only the beginning
 * of the root. */
static void check_attention(int type, int64_t root_length, int64_t nodes, int64_t wide,
                            int64_t heads, int64_t kv_heads, int64_t dim, float normalizer,
                            int limited) {
    int64_t slots = root_length + nodes + 3, first = 5, *order = calloc(slots, sizeof *order);
    for (int64_t i = 0; i < slots; i++) order[i] = i;
    for (int64_t i = slots - 1; i > 0; i--) {
        int64_t j = below(i + 1), other = order[i];
        order[i] = order[j], order[j] = other;
    }
    int64_t *ends = calloc(nodes, sizeof *ends), *path = calloc(nodes + 1, sizeof *path), depth = 0;
    for (int64_t i = 0; i < nodes; i++) { /* a node closes some of the open path above it */
        int64_t kept = wide == 1 ? depth : below(depth + 1);
        for (; depth > kept; depth--) ends[path[depth - 1]] = first + i;
        path[depth++] = i;
    }
    for (; depth > 0; depth--) ends[path[depth - 1]] = first + nodes;
    char *query = numbers(type, nodes * heads * dim), *keys = numbers(type, slots * kv_heads * dim);
    char *values = numbers(type, slots * kv_heads * dim), *out = numbers(type, nodes * heads * dim);
    int64_t *limits = calloc(first + nodes, sizeof *limits);
    for (int64_t i = 0; i < nodes; i++) limits[first + i] = below(root_length + 1);
    Tree tree = {order, root_length, order + root_length, ends, first, nodes, NULL,
                 limited ? limits : NULL, 0, nodes};
    tree_attention(type, query, keys, values, out, &tree, 1, heads, kv_heads, dim, 0.3f, normalizer,
                   0);
    double *scores = calloc(slots, sizeof *scores);
    for (int64_t i = 0; i < nodes; i++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t kv = h / (heads / kv_heads), at = (i * heads + h) * dim;
            double top = -INFINITY, total = 0;
            for (int64_t j = 0; j < root_length + nodes; j++) {
                int64_t node = j - root_length;
                int sees = node < 0 ? !limited || j < limits[first + i]
                                    : node <= i && first + i < ends[node];
                scores[j] = sees ? 0 : -INFINITY;
                for (int64_t d = 0; sees && d < dim; d++)
                    scores[j] += 0.3f * get(type, query, at + d) *
                                 get(type, keys, (order[j] * kv_heads + kv) * dim + d);
                top = scores[j] > top ? scores[j] : top;
            }
            for (int64_t j = 0; j < root_length + nodes; j++) {
                double silu = isinf(scores[j]) ? 0 : scores[j] / (1 + exp(-scores[j]));
                scores[j] = normalizer ? silu : exp(scores[j] - top);
                total += scores[j];
            }
            if (normalizer) total = normalizer;
            for (int64_t d = 0; d < dim; d++) {
                double expected = 0;
                for (int64_t j = 0; j < root_length + nodes; j++)
                    expected += scores[j] / total *
                                get(type, values, (order[j] * kv_heads + kv) * dim + d);
                compare("attention", type, get(type, out, at + d), expected,
                        eps_of(type) * fabs(expected) + 5e-6);
            }
        }
    free(order), free(ends), free(path), free(query), free(keys), free(values), free(out);
    free(scores), free(limits);
}

static void check_rows(int type, int64_t rows, int64_t size) {
    char *x = numbers(type, rows * 2 * size), *weight = numbers(type, size);
    char *out = numbers(type, rows * size);
    rms_norm(type, x, weight, out, rows, size, 1e-5f);
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        for (int64_t i = 0; i < size; i++)
            squares += get(type, x, r * size + i) * get(type, x, r * size + i);
        for (int64_t i = 0; i < size; i++) {
            double expected =
                get(type, x, r * size + i) / sqrt(squares / size + 1e-5) * get(type, weight, i);
            compare("norm", type, get(type, out, r * size + i), expected,
                    2 * eps_of(type) * fabs(expected) + 1e-6);
        }
    }
    silu_mul(type, x, out, rows, size);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i++) {
            double gate = get(type, x, r * 2 * size + i);
            double expected = gate / (1 + exp(-gate)) * get(type, x, (r * 2 + 1) * size + i);
            compare("gate", type, get(type, out, r * size + i), expected,
                    2 * eps_of(type) * fabs(expected) + 1e-6);
        }
    free(x), free(weight), free(out);
}

int main(int count, char **arguments) {
    if (count > 1 && !strcmp(arguments[1], "wrong")) shift = 0.05;
    for (int type = FLOAT32; type <= BFLOAT16; type++) {
        for (int how = OWN_TYPE; how <= INT8; how++) {
            if (how == FLOAT16 && type != FLOAT32) continue;
            int64_t shapes[][3] = {{1, 2, 1}, {7, 64, 63}, {13, 130, 65}, {100, 384, 200}};
            for (int i = 0; i < 4; i++)
                check_products(type, shapes[i][0], shapes[i][1], shapes[i][2], how);
        }
        check_attention(type, 0, 1, 1, 2, 2, 32, 0, 0);     /* one node */
        check_attention(type, 100, 1, 1, 8, 2, 64, 0, 0);   /* a step of plain decoding */
        check_attention(type, 37, 150, 1, 4, 4, 32, 0, 0);  /* a prompt */
        check_attention(type, 201, 56, 2, 8, 4, 128, 0, 0); /* a draft */
        check_attention(type, 201, 56, 2, 8, 4, 64, 0, 1);  /* a draft that sees part of its root */
        check_attention(type, 37, 150, 1, 2, 2, 32, 32, 0); /* a ranker's history */
        check_attention(type, 77, 150, 2, 2, 2, 32, 32, 1); /* nodes that see part of it */
        check_rows(type, 3, 1), check_rows(type, 5, 17), check_rows(type, 4, 1000);
    }
    printf("%lld comparisons, %lld failed, %d lanes\n", (long long)compared, (long long)failed,
           LANES);
    return failed > 0;
}
