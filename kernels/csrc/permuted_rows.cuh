// Writes 16 columns per thread of a token's quantized row to all of its permuted rows.
#pragma once

#include "floats.cuh"

// Up to kAtOnce of a token's permuted rows.
struct PermutedRows {
    static constexpr int kAtOnce = 8;  // looked up together
    i64 row[kAtOnce];                  // -1: none

    __device__ __forceinline__ void load(const int* inverse_permutation, int count) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) row[i] = i < count ? inverse_permutation[i] : -1;
    }

    __device__ __forceinline__ bool any() const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) found = found || row[i] >= 0;
        return found;
    }

    // data: e4m3 [rows, k]; scales: fp32 [ceil(k / 128), scale_stride], written by one of the eight threads that share
    // one
    __device__ __forceinline__ void write(uint4 columns, float scale, int column, int k, u8* data, float* scales,
                                          u32 scale_stride) const {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (row[i] < 0) continue;
            *reinterpret_cast<uint4*>(data + row[i] * k + column) = columns;
            if (threadIdx.x % 8 == 0)
                scales[static_cast<i64>(column / floats::kScaleBlock) * scale_stride + row[i]] = scale;
        }
    }
};
