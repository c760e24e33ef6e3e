// SwiGLU in the epilogue, and what its result is divided by before it becomes FP8.
#pragma once

#include "storage.cuh"

#if SWIGLU
namespace activation {

constexpr float kLargest = 3.40282347e38f;

// gate = gate * sigmoid(alpha * gate) * up, gates cut at limit and ups at both; alpha 1 and no limit for most families.
template <int kCount>
__device__ __forceinline__ void swiglu(float* gate, float* up, const Output& output) {
    if (output.limit < kLargest) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            gate[i] = ptx::min_or_nan(gate[i], output.limit);
            up[i] = ptx::max_or_nan(ptx::min_or_nan(up[i], output.limit), -output.limit);
        }
    }
    const float to_exponent = -1.44269504f * output.alpha;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        gate[i] = gate[i] * ptx::approximate_reciprocal(1.0f + ptx::approximate_exp2(gate[i] * to_exponent)) * up[i];
}

// The scale of 128 columns, as kernels/ops/quantize.py says; never zero or subnormal.
__device__ __forceinline__ float scale_of(float largest) {
    constexpr float kMost = 448.0f, kSmallestNormal = 1.17549435e-38f;
    return ptx::max_or_nan(largest, kMost * kSmallestNormal) * (1.0f / kMost);
}

}  // namespace activation
#endif
