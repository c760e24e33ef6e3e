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

    static __device__ __forceinline__ void prepare(Shared&, const Arguments&, const Problem&, const Tile&) {}

    // gate = gate * sigmoid(alpha * gate) * up.
    static __device__ __forceinline__ void activate(Shared&, const Arguments& given, float* gate, float* up, int, int) {
        constexpr float kLargestFloat = 3.40282347e38f;
        if (given.limit < kLargestFloat) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                gate[i] = ptx::min_or_nan(gate[i], given.limit);
                up[i] = ptx::max_or_nan(ptx::min_or_nan(up[i], given.limit), -given.limit);
            }
        }
        const float to_exponent = -1.44269504f * given.alpha;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            gate[i] =
                gate[i] * ptx::approximate_reciprocal(1.0f + ptx::approximate_exp2(gate[i] * to_exponent)) * up[i];
    }
};
