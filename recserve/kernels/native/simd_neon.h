/* NEON of 64-bit Arm. */
#pragma once
#define LANES 4
#define REGISTERS 32
#include "simd.h"
#include <arm_neon.h>

/* Returns x * y + z, rounded once. */
INLINE floats mul_add(floats x, floats y, floats z) {
    return (floats)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
}

/* Loads float16 numbers, which must be finite. */
INLINE floats load_float16(const void *at) {
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
}

INLINE floats load_int8(const void *at) {
    uint32_t four;
    memcpy(&four, at, sizeof four); /* a load of eight bytes could pass the end of the weight */
    return (floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}
