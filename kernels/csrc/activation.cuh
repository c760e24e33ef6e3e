// SwiGLU in the epilogue, and what its result is divided by before it becomes FP8.
#pragma once

#include "storage.cuh"

#if SWIGLU
namespace activation {

// gate * sigmoid(alpha * gate) * up, gate cut at limit and up at both; alpha 1 and no limit for most families.
__device__ __forceinline__ float swiglu(float gate, float up, const Output& output) {
    gate = ptx::min_or_nan(gate, output.limit);
    up = ptx::max_or_nan(ptx::min_or_nan(up, output.limit), -output.limit);
    return __fdividef(gate, 1.0f + __expf(-output.alpha * gate)) * up;
}

// The scale of 128 columns, as kernels/quantize.py says; never zero or subnormal.
__device__ __forceinline__ float scale_of(float largest) {
    constexpr float kMost = 448.0f, kSmallestNormal = 1.17549435e-38f;
    return ptx::max_or_nan(largest, kMost * kSmallestNormal) * (1.0f / kMost);
}

}  // namespace activation
#endif
