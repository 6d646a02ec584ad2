/* Vectors of floats that fill one register, loaded from and stored to either number type.
 *
 * They use GCC's vector extensions, so the sources name no instruction set. The compiler keeps a
 * vector in memory if it is wider than a register, so the width is the instruction set's.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#if defined __AVX512F__ || defined __aarch64__
#define REGISTERS 32
#else
#define REGISTERS 16
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

enum { FLOAT32, BFLOAT16 };

INLINE floats all(float x) { return x - (floats){}; }

INLINE floats load(int type, const void *data, int64_t at) {
    if (type == FLOAT32) {
        floats x;
        memcpy(&x, (const float *)data + at, sizeof x);
        return x;
    }
    halves x;
    memcpy(&x, (const uint16_t *)data + at, sizeof x);
    return (floats)(__builtin_convertvector(x, words) << 16);
}

/* Rounds to nearest, ties to even; a NaN stays NaN. */
INLINE void store(int type, void *data, int64_t at, floats x) {
    if (type == FLOAT32) {
        memcpy((float *)data + at, &x, sizeof x);
        return;
    }
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)(x != x);
    halves half = __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), halves);
    memcpy((uint16_t *)data + at, &half, sizeof half);
}

/* Returns the floats after rounding to the type. */
INLINE floats rounded(int type, floats x) {
    char stored[sizeof x];
    store(type, stored, 0, x);
    return load(type, stored, 0);
}

/* Loads the first `count` elements of a vector; the rest is 0. */
INLINE floats load_some(int type, const void *data, int64_t at, int64_t count) {
    if (count >= LANES) return load(type, data, at);
    char some[4 * LANES] = {0};
    int64_t size = type == FLOAT32 ? 4 : 2;
    memcpy(some, (const char *)data + at * size, count * size);
    return load(type, some, 0);
}

INLINE void store_some(int type, void *data, int64_t at, floats x, int64_t count) {
    if (count >= LANES) return store(type, data, at, x);
    char some[4 * LANES];
    int64_t size = type == FLOAT32 ? 4 : 2;
    store(type, some, 0, x);
    memcpy((char *)data + at * size, some, count * size);
}

INLINE floats choose(ints mask, floats x, floats other) {
    return (floats)(((ints)x & mask) | ((ints)other & ~mask));
}

/* A vector of a macro's value for each lane, a compile-time constant if `half` is one. */
#define FOUR(what, from, half)                                                                     \
    what(from, half), what(from + 1, half), what(from + 2, half), what(from + 3, half)
#if LANES == 16
#define OF_LANES(what, half)                                                                       \
    ((ints){FOUR(what, 0, half), FOUR(what, 4, half), FOUR(what, 8, half), FOUR(what, 12, half)})
#elif LANES == 8
#define OF_LANES(what, half) ((ints){FOUR(what, 0, half), FOUR(what, 4, half)})
#else
#define OF_LANES(what, half) ((ints){FOUR(what, 0, half)})
#endif
#define OTHER(lane, half) ((lane) ^ (half))

INLINE floats turned(floats x, int half) { return __builtin_shuffle(x, OF_LANES(OTHER, half)); }

INLINE float sum(floats x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) x += turned(x, half);
    return x[0];
}

INLINE floats larger(floats x, floats other) { return choose(x > other, x, other); }

INLINE float largest(floats x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) x = larger(x, turned(x, half));
    return x[0];
}

#define LOW(lane, half) ((lane) & (half) ? LANES + (lane) - (half) : (lane))
#define HIGH(lane, half) ((lane) & (half) ? LANES + (lane) : (lane) + (half))

/* Returns the sum of each of LANES vectors, added by halves as in `sum`. */
INLINE floats sums(floats *x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            x[i] = __builtin_shuffle(x[i], x[i + half], OF_LANES(LOW, half)) +
                   __builtin_shuffle(x[i], x[i + half], OF_LANES(HIGH, half));
    return x[0];
}

/* Transposes a matrix of LANES vectors. */
INLINE void transpose(floats *x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int pair = 0; pair < LANES / 2; pair++) {
            int i = pair / half * 2 * half + pair % half;
            floats first = x[i], second = x[i + half];
            x[i] = __builtin_shuffle(first, second, OF_LANES(LOW, half));
            x[i + half] = __builtin_shuffle(first, second, OF_LANES(HIGH, half));
        }
}

/* e^x with an error of two units in the last place; 0 below -87. x is at most 88. Cody and Waite's
 * reduction. */
INLINE floats exponential(floats x) {
    const float far = 12582912.0f; /* 1.5 * 2^23: adding it rounds a float to an integer */
    words small = (words)(x < -87.0f);
    floats turns = x * 1.44269504f + far, n = turns - far;
    floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    words power = (words)p + ((words)turns << 23); /* the lowest bits of turns hold n */
    return (floats)(power & ~small);
}
