// How a warp's 16 rows of results leave for memory where tokens are on wgmma's M side.
#pragma once

#include "storage.cuh"

// Writes them into the warp's staging, in boxes of 16 rows x 64 columns with the swizzle of the output's descriptor: a
// box is a copy that goes on under the next tile's multiplications. Where the tile ends inside the 16 rows, the next
// group's begin, and threads store the rows that are the tile's.
template <int kAccumulators>
__device__ __forceinline__ void store_rows(const float (&sum)[kAccumulators], u32 staging, const Output& output, int row,
                                           int rows, int column) {
    constexpr u32 kBoxBytes = 16 * 128;
    const int lane = threadIdx.x % 32;
    ptx::wait_bulk_stores_read();  // of the tile before: its results lie in the same place
    __syncwarp();
    const u32 to = staging + lane % 16 * 128;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 8) {
        const u32 chunk = i / 4 % 8 + lane / 16;  // of 16 bytes in the row of a box
        ptx::stmatrix(to + i / 32 * kBoxBytes + (chunk ^ lane % 8) * 16, ptx::pack_bf16(sum[i], sum[i + 1]),
                      ptx::pack_bf16(sum[i + 2], sum[i + 3]), ptx::pack_bf16(sum[i + 4], sum[i + 5]),
                      ptx::pack_bf16(sum[i + 6], sum[i + 7]));
    }
    if (rows >= 16) {
        ptx::fence_writes_for_copies();
        __syncwarp();
        if (ptx::elect_one()) {
#pragma unroll
            for (int box = 0; box < kAccumulators / 32; ++box)
                ptx::tma_store(output.map, staging + box * kBoxBytes, column + box * 64, row);
        }
    } else if (rows > 0) {
        __syncwarp();
        u16* const out = output.out + static_cast<i64>(row) * output.n + column;
        for (int i = lane; i < rows * kAccumulators / 4; i += 32) {
            const int r = i / (kAccumulators / 4), chunk = i % (kAccumulators / 4);
            if (column + chunk * 8 < output.n) {
                *reinterpret_cast<uint4*>(out + static_cast<i64>(r) * output.n + chunk * 8) =
                    ptx::load_shared(staging + chunk / 8 * kBoxBytes + r * 128 + (chunk % 8 ^ r % 8) * 16);
            }
        }
    }
}
