/* Types of vectors that fill one register of LANES floats; a simd_*.h file for each level of
 * instruction sets defines LANES and includes this file.
 *
 * The bits of a result follow from the sources alone. The compiler fuses no multiplication with an
 * addition (-ffp-contract=off); where both are to be rounded once, the sources say `mul_add`. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
#ifdef __clang__
#define UNROLL(count) PRAGMA(unroll count)
/* clang's OpenMP runtime is not the one that torch uses, so Python passes the number of threads. */
extern _Thread_local int num_threads;
#define PARALLEL_FOR(...) PRAGMA(omp parallel for num_threads(num_threads) __VA_ARGS__)
#else
#define UNROLL(count) PRAGMA(GCC unroll count)
#define PARALLEL_FOR(...) PRAGMA(omp parallel for __VA_ARGS__)
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
