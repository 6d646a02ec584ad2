/* AVX2 with FMA and F16C. */
#pragma once
#define LANES 8
#define REGISTERS 16
#include "simd.h"
#include <immintrin.h>

/* Returns x * y + z, rounded once. */
INLINE floats mul_add(floats x, floats y, floats z) {
    return (floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
}

/* Loads float16 numbers, which must be finite. */
INLINE floats load_float16(const void *at) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128(at)); }

INLINE floats load_int8(const void *at) {
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at)));
}
