/* AVX-512, with products of bfloat16 pairs where the level has them. */
#pragma once
#define LANES 16
#define REGISTERS 32
#include "simd.h"
#include <immintrin.h>

/* Returns x * y + z, rounded once. */
INLINE floats mul_add(floats x, floats y, floats z) {
    return (floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
}

/* Loads float16 numbers, which must be finite. */
INLINE floats load_float16(const void *at) {
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(at));
}

INLINE floats load_int8(const void *at) {
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
}

#ifdef __AVX512BF16__
#define DOT_BF16
/* Adds the products of LANES pairs of bfloat16 to a sum. */
INLINE floats dot_bf16(floats sum, words x, words y) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}

/* Rounds 2 LANES floats to bfloat16: the low half first. */
INLINE words to_bf16(floats low, floats high) {
    return (words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#endif
