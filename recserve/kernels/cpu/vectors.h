/* Vectors of sixteen floats, and how they come from and go to numbers of either type.
 *
 * They are the compiler's own (GCC's vector extensions), so that the sources name no instruction set.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

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

/* Rounded to the nearest, ties to even; a NaN stays one. */
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

/* The first `count` elements of a vector, zeros behind. */
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

INLINE float sum(floats x) {
    float parts[LANES];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

INLINE float largest(floats x) {
    float parts[LANES];
    memcpy(parts, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
    return parts[0];
}

/* e^x to two units in the last place; 0 below -87, x at most 88. Cody and Waite's reduction. */
INLINE floats exponential(floats x) {
    words small = (words)(x < -87.0f);
    floats turns = x * 1.44269504f;
    floats half = (floats)((words)all(0.5f) | ((words)turns & 0x80000000u)); /* with its sign */
    ints whole = __builtin_convertvector(turns + half, ints);
    floats n = __builtin_convertvector(whole, floats);
    floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    floats power = (floats)((whole + 127) << 23);
    return (floats)((words)(p * power) & ~small);
}
