// Adds up the permuted rows of a token, 8 columns per thread, in fp32 and in the order of the token's slots.
#pragma once

#include "floats.cuh"

// Up to 32 of a token's slots, one in each lane of a warp, all of whose lanes call.
struct Slots {
    static constexpr int kMost = 32;
    static constexpr int kAtOnce = 8;  // rows whose loads are in flight together
    int row = -1;                      // -1: nothing to add
    float weight = 0.0f;

    // `weights` has one for every `stride` numbers.
    __device__ __forceinline__ void load(const int* inverse_permutation, const float* weights, int stride, int count) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        row = lane < count ? inverse_permutation[lane] : -1;
        weight = lane < count ? weights[lane * stride] : 0.0f;
    }

    __device__ __forceinline__ bool any() const { return __any_sync(0xffffffff, row >= 0); }

    // rows: bf16 [rows, n]
    __device__ __forceinline__ void add(float (&sum)[8], int count, const u16* rows, int n, int column) const {
#pragma unroll 1
        for (int first = 0; first < min(count, kMost); first += kAtOnce) {
            int from[kAtOnce];
            float by[kAtOnce];
            uint4 packed[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                from[i] = __shfl_sync(0xffffffff, row, first + i);
                by[i] = __shfl_sync(0xffffffff, weight, first + i);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                packed[i] = {0, 0, 0, 0};
                if (from[i] >= 0 && column < n)
                    packed[i] = *reinterpret_cast<const uint4*>(rows + static_cast<i64>(from[i]) * n + column);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                float value[8];
                floats::unpack<true>(value, packed[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += (from[i] >= 0 ? by[i] : 0.0f) * value[j];
            }
        }
    }
};
