// Adds up the permuted rows of a token, 8 columns per thread, in fp32 and in the order of the token's slots.
#pragma once

#include "floats.cuh"

// Up to kAtOnce of a token's slots.
struct Slots {
    static constexpr int kAtOnce = 8;  // rows whose loads are in flight together
    int row[kAtOnce];                  // -1: nothing to add
    float weight[kAtOnce];

    // `weights` has one for every `stride` numbers.
    __device__ __forceinline__ void load(const int* inverse_permutation, const float* weights, int stride, int count) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            row[i] = i < count ? inverse_permutation[i] : -1;
            weight[i] = row[i] >= 0 ? weights[i * stride] : 0.0f;
        }
    }

    __device__ __forceinline__ bool any() const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) found = found || row[i] >= 0;
        return found;
    }

    // rows: bf16 [rows, n]
    __device__ __forceinline__ void add(float (&sum)[8], const u16* rows, int n, int column) const {
        uint4 packed[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            packed[i] = {0, 0, 0, 0};
            if (row[i] >= 0) packed[i] = *reinterpret_cast<const uint4*>(rows + static_cast<i64>(row[i]) * n + column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float value[8];
            floats::unpack<true>(value, packed[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += weight[i] * value[j];
        }
    }
};
