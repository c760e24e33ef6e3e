// Stores rows of bf16: 16 rows per warp, by TMA where a tile fills them.
#pragma once

#include "parameters.cuh"

struct Bf16Epilogue {
    static constexpr int kBoxes = (kBlockN + 63) / 64;
    static constexpr u32 kBoxBytes = 16 * 128;
    struct Output {
        u16* out;  // bf16 [rows, n]
    };
    struct Shared {
        u8 staging[kConsumerWarps][kBoxes * kBoxBytes];

        __device__ __forceinline__ void init_barriers() {}
    };

    Shared& shared;
    const ptx::TensorMap& map;
    const Output output;
    const Problem problem;

    __device__ __forceinline__ void prepare(const Tile&) {}

    // Stages boxes of 16 rows x 64 columns in shared memory, swizzled as in the output's tensor map, so that the copy
    // of a box overlaps the next tile's multiplications. If the tile ends within the 16 rows, the rest belong to the
    // next group; then threads store the tile's rows themselves.
    __device__ __forceinline__ void store(const float (&sum)[kBlockN / 2], const Tile& tile) {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
        const int row = problem.first_row(tile) + first, rows = tile.rows - first;
        const u32 staging = ptx::shared_address(shared.staging) + first / 16 * (kBoxes * kBoxBytes);

        // -- stage: what the previous tile left in the same place has been copied
        ptx::commit_and_wait_bulk_stores_read();
        __syncwarp();
        const u32 to = staging + lane % 16 * 128;
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += 8) {
            const u32 chunk = i / 4 % 8 + lane / 16;  // 16-byte chunk in the row of a box
            ptx::stmatrix(to + i / 32 * kBoxBytes + (chunk ^ lane % 8) * 16, ptx::pack_bf16(sum[i], sum[i + 1]),
                          ptx::pack_bf16(sum[i + 2], sum[i + 3]), ptx::pack_bf16(sum[i + 4], sum[i + 5]),
                          ptx::pack_bf16(sum[i + 6], sum[i + 7]));
        }

        // -- copy
        if (rows >= 16) {
            ptx::fence_proxy_async();
            __syncwarp();
            if (ptx::elect_one()) {
#pragma unroll
                for (int box = 0; box < kBlockN / 64; ++box)
                    ptx::tma_store(&map, staging + box * kBoxBytes, tile.column + box * 64, row);
            }
            if constexpr (kBlockN % 64 > 0) store_columns<kBlockN / 64 * 64>(tile, staging, row, 16);
        } else if (rows > 0) {
            __syncwarp();
            store_columns<0>(tile, staging, row, rows);
        }
    }

    // Its stores read the CTA's shared memory.
    __device__ __forceinline__ void finish() { ptx::commit_and_wait_bulk_stores_read(); }

    // The staged rows from column kFirst on, stored by the warp's threads.
    template <int kFirst>
    __device__ __forceinline__ void store_columns(const Tile& tile, u32 staging, int row, int rows) const {
        constexpr int kChunks = (kBlockN - kFirst) / 8;
        u16* const out = output.out + static_cast<i64>(row) * problem.n + tile.column;
        for (int i = threadIdx.x % 32; i < rows * kChunks; i += 32) {
            const int r = i / kChunks, chunk = kFirst / 8 + i % kChunks;
            if (tile.column + chunk * 8 < problem.n) {
                *reinterpret_cast<uint4*>(out + static_cast<i64>(r) * problem.n + chunk * 8) =
                    ptx::load_shared(staging + chunk / 8 * kBoxBytes + r * 128 + (chunk % 8 ^ r % 8) * 16);
            }
        }
    }
};
