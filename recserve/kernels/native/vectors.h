/* Operations on vectors of floats that fill one register, for either number type. */
#pragma once
#if defined __AVX512F__
#include "simd_avx512.h"
#elif defined __AVX2__ && defined __FMA__ && defined __F16C__
#include "simd_avx2.h"
#elif defined __aarch64__
#include "simd_neon.h"
#else
#error "no simd_*.h for these instructions: torch computes there"
#endif

enum { FLOAT32, BFLOAT16 };

INLINE floats broadcast(float x) { return x - (floats){}; }

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

/* Indices for a shuffle of two vectors: a macro's value for each lane. */
#define FOUR(what, from, half)                                                                     \
    what(from, half), what(from + 1, half), what(from + 2, half), what(from + 3, half)
#if LANES == 16
#define OF_LANES(what, half)                                                                       \
    FOUR(what, 0, half), FOUR(what, 4, half), FOUR(what, 8, half), FOUR(what, 12, half)
#elif LANES == 8
#define OF_LANES(what, half) FOUR(what, 0, half), FOUR(what, 4, half)
#else
#define OF_LANES(what, half) FOUR(what, 0, half)
#endif
#define OTHER(lane, half) ((lane) ^ (half))
#define LOW(lane, half) ((lane) & (half) ? LANES + (lane) - (half) : (lane))
#define HIGH(lane, half) ((lane) & (half) ? LANES + (lane) : (lane) + (half))

/* Shuffles by a power of two that is below LANES. Indices have to be literals; a constant `half`
 * leaves one of the cases. */
#define SHUFFLE(x, y, what, half)                                                                  \
    switch (half) {                                                                                \
    case LANES / 2: return __builtin_shufflevector(x, y, OF_LANES(what, LANES / 2));               \
    case LANES / 4: return __builtin_shufflevector(x, y, OF_LANES(what, LANES / 4));               \
        SHUFFLE_SMALL(x, y, what)                                                                  \
    }                                                                                              \
    return x
#if LANES == 16
#define SHUFFLE_SMALL(x, y, what)                                                                  \
    case 2: return __builtin_shufflevector(x, y, OF_LANES(what, 2));                               \
    case 1: return __builtin_shufflevector(x, y, OF_LANES(what, 1));
#elif LANES == 8
#define SHUFFLE_SMALL(x, y, what)                                                                  \
    case 1: return __builtin_shufflevector(x, y, OF_LANES(what, 1));
#else
#define SHUFFLE_SMALL(x, y, what)
#endif

INLINE floats swap_halves(floats x, int half) { SHUFFLE(x, x, OTHER, half); }
INLINE floats low_of(floats x, floats y, int half) { SHUFFLE(x, y, LOW, half); }
INLINE floats high_of(floats x, floats y, int half) { SHUFFLE(x, y, HIGH, half); }

INLINE float sum(floats x) {
    UNROLL(4)
    for (int half = LANES / 2; half; half /= 2) x += swap_halves(x, half);
    return x[0];
}

INLINE floats larger(floats x, floats other) { return choose(x > other, x, other); }

INLINE float largest(floats x) {
    UNROLL(4)
    for (int half = LANES / 2; half; half /= 2) x = larger(x, swap_halves(x, half));
    return x[0];
}

/* Returns the sum of each of LANES vectors, added by halves as in `sum`. */
INLINE floats sums(floats *x) {
    UNROLL(4)
    for (int half = LANES / 2; half; half /= 2)
        UNROLL(8)
        for (int i = 0; i < half; i++)
            x[i] = low_of(x[i], x[i + half], half) + high_of(x[i], x[i + half], half);
    return x[0];
}

/* Transposes a matrix of LANES vectors. */
INLINE void transpose(floats *x) {
    UNROLL(4)
    for (int half = LANES / 2; half; half /= 2)
    UNROLL(8)
        for (int pair = 0; pair < LANES / 2; pair++) {
            int i = pair / half * 2 * half + pair % half;
            floats first = x[i], second = x[i + half];
            x[i] = low_of(first, second, half);
            x[i + half] = high_of(first, second, half);
        }
}

/* e^x with an error of two units in the last place; 0 below -87. x is at most 88. Cody and Waite's
 * reduction. */
INLINE floats exponential(floats x) {
    const float far = 12582912.0f; /* 1.5 * 2^23: adding it rounds a float to an integer */
    words small = (words)(x < -87.0f);
    floats turns = mul_add(x, broadcast(1.44269504f), broadcast(far)), n = turns - far;
    floats r = mul_add(n, broadcast(2.12194440e-4f), mul_add(n, broadcast(-0.693359375f), x));
    floats p = broadcast(1.9875691500e-4f);
    p = mul_add(p, r, broadcast(1.3981999507e-3f));
    p = mul_add(p, r, broadcast(8.3334519073e-3f));
    p = mul_add(p, r, broadcast(4.1665795894e-2f));
    p = mul_add(p, r, broadcast(1.6666665459e-1f));
    p = mul_add(p, r, broadcast(5.0000001201e-1f));
    p = mul_add(p * r, r, r) + 1.0f;
    words power = (words)p + ((words)turns << 23); /* the lowest bits of turns hold n */
    return (floats)(power & ~small);
}

/* log(x) of a normal number x > 0; a NaN stays NaN. With x = 2^e (1 + f) and s = f / (f + 2), log(1
 * + f) = 2 s + s z (2/3 + z (2/5 + ...)) with z = s * s, as in noise.py. */
INLINE float logarithm(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t exponent = (bits - 0x3f400000) >> 23; /* so that f is in -1/4 : 1/2 */
    bits -= exponent * (1 << 23);
    float f;
    memcpy(&f, &bits, sizeof f);
    f -= 1.0f;
    float s = f / (f + 2.0f), z = s * s;
    float tail = z * 0.2222222238779068f;
    tail = (tail + 0.2857142984867096f) * z;
    tail = (tail + 0.4000000059604645f) * z;
    tail = (tail + 0.6666666865348816f) * z;
    return x == x ? (tail + 2.0f) * s + exponent * 0.693147182464599609375f : x;
}
