// silu(gate) * up, with gates clamped to at most limit and ups to +-limit; for most families alpha is 1 and limit
// infinite.
#pragma once

#include "parameters.cuh"

struct Swiglu {
    struct Arguments {
        float alpha, limit;
    };
    struct Shared {
        u8 staging[kConsumerWarps][16 * 64];
    };

    struct Biases {};  // of a column: none
    static __device__ __forceinline__ Biases biases(const Arguments&, const Problem&, const Tile&, int) { return {}; }

    static __device__ __forceinline__ void prepare(Shared&, const Arguments&, const Problem&, const Tile&) {}

    static __device__ __forceinline__ void activate(Shared&, const Arguments& given, float* gate, float* up, int, int) {
        apply<32>(given, {}, gate, up);
    }

    // gate = gate * sigmoid(alpha * gate) * up.
    template <int kCount>
    static __device__ __forceinline__ void apply(const Arguments& given, const Biases&, float* gate, float* up) {
        constexpr float kLargestFloat = 3.40282347e38f;
        if (given.limit < kLargestFloat) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                gate[i] = ptx::min_or_nan(gate[i], given.limit);
                up[i] = ptx::max_or_nan(ptx::min_or_nan(up[i], given.limit), -given.limit);
            }
        }
        const float to_exponent = -1.44269504f * given.alpha;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            gate[i] =
                gate[i] * ptx::approximate_reciprocal(1.0f + ptx::approximate_exp2(gate[i] * to_exponent)) * up[i];
    }
};
