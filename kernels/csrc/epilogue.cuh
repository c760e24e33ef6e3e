// How a warp's 16 rows of results leave for memory where tokens are on wgmma's M side.
#pragma once

#include "activation.cuh"
#include "storage.cuh"

#if !SWIGLU
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
#else
// sum: a gate in its first half, an up in its second. Each CTA of a pair has 64 of a scale's 128 columns, so the warps
// that have the same rows tell each other the largest number of each.
__device__ __forceinline__ void store_activated(float (&sum)[64], Largest& largest, u32& turn, u32 staging,
                                                const Output& output, int row, int rows, int column) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
    float low = 0.0f, high = 0.0f;  // rows r and r + 8
    activation::swiglu<32>(sum, sum + 32, output);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        float& most = i % 4 < 2 ? low : high;
        most = ptx::max_or_nan(most, fabsf(sum[i]));
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        low = ptx::max_or_nan(low, __shfl_xor_sync(0xffffffff, low, distance));
        high = ptx::max_or_nan(high, __shfl_xor_sync(0xffffffff, high, distance));
    }
    u64* const there = &largest.there[turn % 2][warp];
    float2* const theirs = &largest.theirs[turn % 2][warp][r];
    if (c == 0) ptx::store_to_cta(theirs, float2{low, high}, there, output.rank ^ 1);
    if (ptx::elect_one()) ptx::mbarrier_arrive_expect_bytes(there, 8 * sizeof(float2));
    __syncwarp();
    ptx::mbarrier_wait(there, turn / 2 % 2);
    ++turn;
    low = activation::scale_of(ptx::max_or_nan(low, theirs->x));
    high = activation::scale_of(ptx::max_or_nan(high, theirs->y));
    if (c == 0 && output.rank == 0) {
        float* const scales = output.scales + static_cast<i64>(column / 128) * output.scale_stride + row + r;
        if (r < rows) scales[0] = low;
        if (r + 8 < rows) scales[8] = high;
    }
    const float by_low = __frcp_rn(low), by_high = __frcp_rn(high);
    const u32 to = staging + r * 64 + c * 2, swizzle = r / 2 % 4;  // rows r and r + 8 have the same
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const u32 place = to + ((i / 8 ^ swizzle) * 16) + i / 4 % 2 * 8;
        ptx::store_shared(place, ptx::pack_e4m3(sum[i] * by_low, sum[i + 1] * by_low));
        ptx::store_shared(place + 8 * 64, ptx::pack_e4m3(sum[i + 2] * by_high, sum[i + 3] * by_high));
    }
    __syncwarp();
    u8* const out = output.out + static_cast<i64>(row) * output.n + column;
#pragma unroll
    for (int i = lane; i < 64; i += 32) {
        const int of = i / 4, chunk = i % 4;
        if (of < rows)
            *reinterpret_cast<uint4*>(out + static_cast<i64>(of) * output.n + chunk * 16) =
                ptx::load_shared(staging + of * 64 + (chunk ^ of / 2 % 4) * 16);
    }
    __syncwarp();
}
#endif
