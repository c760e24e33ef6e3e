// Adds up the permuted rows of a token, 8 columns per thread, in fp32 and in the order of the token's slots.
#pragma once

#include "floats.cuh"

// Up to 32 of a token's slots, one in each lane of a warp, all of whose lanes call.
struct Slots {
    static constexpr int kMost = 32;
    static constexpr int kAtOnce = 4;  // rows whose loads are in flight together: a token has few on each rank
    int row = -1;                      // -1: nothing to add
    float weight = 0.0f;

    // `weights` has one for every `stride` numbers.
    __device__ __forceinline__ void load(const int* inverse_permutation, const float* weights, int stride, int count) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        row = lane < count ? inverse_permutation[lane] : -1;
        weight = lane < count ? weights[lane * stride] : 0.0f;
    }

    // A bit for each slot with something to add.
    __device__ __forceinline__ u32 found() const { return __ballot_sync(0xffffffff, row >= 0); }
    __device__ __forceinline__ bool any() const { return found() != 0; }

    // rows: bf16 [rows, n]
    __device__ __forceinline__ void add(float (&sum)[8], const u16* rows, int n, int column) const {
        u32 left = found();  // slots that are not added yet
#pragma unroll 1
        while (left != 0) {
            float by[kAtOnce];
            uint4 packed[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int lane = __ffs(static_cast<int>(left)) - 1;  // -1: no more
                const int from = __shfl_sync(0xffffffff, row, lane);
                by[i] = __shfl_sync(0xffffffff, weight, lane);
                packed[i] = {0, 0, 0, 0};
                if (left == 0) by[i] = 0.0f;
                if (left != 0 && column < n)
                    packed[i] = *reinterpret_cast<const uint4*>(rows + static_cast<i64>(from) * n + column);
                left &= left - 1;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                float value[8];
                floats::unpack<true>(value, packed[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += by[i] * value[j];
            }
        }
    }
};
