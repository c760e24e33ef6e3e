// Moves rows of bf16, fp16 or fp32 into and out of fp32 registers, and computes the scales of FP8 blocks.
#pragma once

#include "ptx.cuh"

namespace floats {

constexpr int kScaleBlock = 128;  // columns that share a scale; in weights, also rows

enum Datatype { BF16, FP16, FP32, E4M3 };  // the last one only for rows that are quantized already

template <Datatype kDatatype>
constexpr u32 kBytes = kDatatype == FP32 ? 4 : 2;

// Converts eight 16-bit floats to fp32.
template <bool kBf16>
__device__ __forceinline__ void unpack(float* to, uint4 eight) {
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        to[2 * pair] = ptx::to_float<kBf16>(words[pair]);
        to[2 * pair + 1] = ptx::to_float<kBf16>(words[pair] >> 16);
    }
}

// Rounds eight numbers to 16 bits.
template <bool kBf16>
__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
    return {ptx::pack<kBf16>(from[0], from[1]), ptx::pack<kBf16>(from[2], from[3]), ptx::pack<kBf16>(from[4], from[5]),
            ptx::pack<kBf16>(from[6], from[7])};
}

// Loads kCount consecutive numbers from `index` on; kCount is a multiple of eight, and eight numbers are aligned.
template <Datatype kDatatype, int kCount>
__device__ __forceinline__ void load(float (&to)[kCount], const void* from, i64 index) {
    if constexpr (kDatatype == FP32) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + index + i);
            to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i += 8) {
            unpack<kDatatype == BF16>(to + i,
                                      *reinterpret_cast<const uint4*>(static_cast<const u16*>(from) + index + i));
        }
    }
}

// Stores eight numbers, aligned in the same way.
template <Datatype kDatatype>
__device__ __forceinline__ void store(void* to, i64 index, const float (&from)[8]) {
    if constexpr (kDatatype == FP32) {
        float4* const out = reinterpret_cast<float4*>(static_cast<float*>(to) + index);
        out[0] = {from[0], from[1], from[2], from[3]};
        out[1] = {from[4], from[5], from[6], from[7]};
    } else {
        *reinterpret_cast<uint4*>(static_cast<u16*>(to) + index) = pack<kDatatype == BF16>(from);
    }
}

// The scale of a block whose largest magnitude is amax, as kernels/ops/quantize.py computes it; never zero or
// subnormal.
__device__ __forceinline__ float e4m3_scale(float amax) {
    constexpr float kE4m3Max = 448.0f, kSmallestNormal = 1.17549435e-38f;
    return ptx::max_or_nan(amax, kE4m3Max * kSmallestNormal) * (1.0f / kE4m3Max);
}

}  // namespace floats
