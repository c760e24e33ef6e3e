// Another gated activation than SwiGLU, and biases before it.
#pragma once

#include "parameters.cuh"

struct OtherGlu {
    struct Arguments {
        float alpha, limit;
        const u16* bias;  // bf16 [num_groups, 2 n], added to gates and ups; null: none
        float up_offset;  // added to the clamped ups
        int clamp_after;  // clamp the activated gates instead of the gates
    };
    struct Shared {
        u8 staging[kConsumerWarps][16 * 64];
        u16 bias[kConsumerWarps][2 * 64];  // of a warp's tile: those of 64 gates, then those of the ups
    };

    // Starts to copy the tile's biases, which are there when `activate` needs them.
    static __device__ __forceinline__ void prepare(Shared& shared, const Arguments& given, const Problem& problem,
                                                   const Tile& tile) {
        const int lane = threadIdx.x % 32, half = lane / 8, column = lane % 8 * 8;
        if (given.bias == nullptr || half >= 2) return;
        const int place = (tile.group * 2 + half) * problem.n + tile.column + column;
        ptx::copy_async(&shared.bias[threadIdx.x / 32][half * 64 + column], given.bias + place);
    }

    static __device__ __forceinline__ void activate(Shared& shared, const Arguments& given, float* gate, float* up,
                                                    int warp, int c) {
        if (given.bias != nullptr) {
            ptx::wait_for_async_copies();
            __syncwarp();
            const u32* const bias = reinterpret_cast<const u32*>(shared.bias[warp]) + c;
#pragma unroll
            for (int i = 0; i < 32; i += 4) {  // columns i / 4 * 8 + c * 2 and the next, of rows r and r + 8
                add_bias(gate + i, bias[i]);
                add_bias(up + i, bias[32 + i]);
            }
        }
        choose<32>(given, gate, up);
    }

    // Of a column, counted from the tile's first.
    struct Biases {
        float gate = 0.0f, up = 0.0f;
    };
    static __device__ __forceinline__ Biases biases(const Arguments& given, const Problem& problem, const Tile& tile,
                                                    int column) {
        if (given.bias == nullptr) return {};
        const u16* const gate = given.bias + tile.group * 2 * problem.n + tile.column + column;
        return {ptx::to_float<true>(__ldg(gate)), ptx::to_float<true>(__ldg(gate + problem.n))};
    }

    // The same for numbers of one column.
    template <int kCount>
    static __device__ __forceinline__ void apply(const Arguments& given, const Biases& biases, float* gate, float* up) {
        if (given.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                gate[i] += biases.gate;
                up[i] += biases.up;
            }
        }
        choose<kCount>(given, gate, up);
    }

  private:
    template <int kCount>
    static __device__ __forceinline__ void choose(const Arguments& given, float* gate, float* up) {
        if (given.clamp_after)  // outside the loop, where the compiler would leave a branch for each number
            activate<kCount, true>(given, gate, up);
        else
            activate<kCount, false>(given, gate, up);
    }

    template <int kCount, bool kClampAfter>
    static __device__ __forceinline__ void activate(const Arguments& given, float* gate, float* up) {
        const float limit = given.limit, to_exponent = -1.44269504f * given.alpha, up_offset = given.up_offset;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float x = kClampAfter ? gate[i] : ptx::min_or_nan(gate[i], limit);
            const float activated = x * ptx::approximate_reciprocal(1.0f + ptx::approximate_exp2(x * to_exponent));
            const float factor = ptx::max_or_nan(ptx::min_or_nan(up[i], limit), -limit) + up_offset;
            gate[i] = (kClampAfter ? ptx::min_or_nan(activated, limit) : activated) * factor;
        }
    }

    static __device__ __forceinline__ void add_bias(float* four, u32 two) {
        const float even = ptx::to_float<true>(two), odd = ptx::to_float<true>(two >> 16);
        four[0] += even;
        four[1] += odd;
        four[2] += even;
        four[3] += odd;
    }
};
