/* The number of threads of a parallel loop where clang's OpenMP runtime runs it (simd.h). */
#include "vectors.h"

#ifdef __clang__
_Thread_local int num_threads = 1;

void use_threads(int count) { num_threads = count; }
#endif
