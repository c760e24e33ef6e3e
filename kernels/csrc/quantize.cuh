// Quantizes 16 columns of a row per thread; eight lanes share a scale's 128 columns. The arithmetic is that of
// kernels/ops/quantize.py, bit for bit, but -0.0 becomes 0.0: Divider adds a correction of 0.0 to it.
#pragma once

#include "floats.cuh"

namespace quantize {

constexpr int kEach = 16;  // columns per lane

// Division rounded as by IEEE 754 (Markstein's correction), except for quotients so small that they are zero in FP8.
struct Divider {
    const float scale, reciprocal;
    __device__ __forceinline__ explicit Divider(float by) : scale(by), reciprocal(__frcp_rn(by)) {}
    __device__ __forceinline__ float operator()(float x) const {
        const float quotient = x * reciprocal;
        return reciprocal > 0.0f ? fmaf(fmaf(-quotient, scale, x), reciprocal, quotient) : quotient;
    }
};

// One thread's columns. All lanes of a warp load together.
struct Row {
    float scale = 0.0f;
    u32 words[kEach / 4] = {};  // e4m3

    template <floats::Datatype kDatatype>
    __device__ __forceinline__ void load(const void* rows, i64 index, bool valid) {
        float x[kEach] = {};
        if (valid) floats::load<kDatatype>(x, rows, index);
        quantize(x);
    }

    // Of bf16 that other GPUs write: past L1, where an SM may have what was there before.
    __device__ __forceinline__ void load_of_other_gpus(const u16* rows, i64 index, bool valid) {
        float x[kEach] = {};
        if (valid) {
            const uint4* const from = reinterpret_cast<const uint4*>(rows + index);
            const uint4 eight = ptx::load_relaxed_system(from), others = ptx::load_relaxed_system(from + 1);
            floats::unpack<true>(x, eight);
            floats::unpack<true>(x + 8, others);
        }
        quantize(x);
    }

    __device__ __forceinline__ void quantize(const float (&x)[kEach]) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) amax = ptx::max_or_nan(amax, fabsf(x[i]));
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2)
            amax = ptx::max_or_nan(amax, __shfl_xor_sync(0xffffffff, amax, distance));
        scale = floats::e4m3_scale(amax);
        const Divider divide(scale);
#pragma unroll
        for (int i = 0; i < kEach / 4; ++i) {
            const float* four = x + i * 4;
            words[i] = ptx::pack_e4m3(divide(four[0]), divide(four[1])) |
                       static_cast<u32>(ptx::pack_e4m3(divide(four[2]), divide(four[3]))) << 16;
        }
    }

    __device__ __forceinline__ uint4 packed() const { return {words[0], words[1], words[2], words[3]}; }
};

}  // namespace quantize
