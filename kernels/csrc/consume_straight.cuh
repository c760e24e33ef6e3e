// Consumers for tall groups: 64 tokens a warpgroup are wgmma's M and the tile's 128 columns its N. A thread needs two
// scales a K block, so promotion costs the shared memory next to nothing.
#pragma once

#include "storage.cuh"
#include "wgmma.cuh"

namespace straight {

constexpr int kAccumulators = kBlockN / 2;

// Writes a warp's 16 rows of a tile, 32 columns at a time through a swizzled buffer of its own.
__device__ __forceinline__ void store(const float (&sum)[kAccumulators], u32 staging, u16* out, int rows, int columns,
                                      int n) {
    const int lane = threadIdx.x % 32;
    const int row_in = lane % 16, row_out = lane / 4, chunk_out = lane % 4;
    // Rows are 64 bytes: two of them share the 32 banks, so the chunk is swizzled by the pair.
    const u32 in = staging + row_in * 64, swizzle_in = row_in / 2 % 4;
    const u32 from = staging + row_out * 64 + ((chunk_out ^ (row_out / 2 % 4)) * 16);
    out += static_cast<i64>(row_out) * n + chunk_out * 8;
#pragma unroll
    for (int part = 0; part < kBlockN / 32; ++part) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const float* s = sum + part * 16 + pair * 8;
            const u32 chunk = pair * 2 + lane / 16;
            ptx::stmatrix(in + ((chunk ^ swizzle_in) * 16), ptx::pack_bf16(s[0], s[1]), ptx::pack_bf16(s[2], s[3]),
                          ptx::pack_bf16(s[4], s[5]), ptx::pack_bf16(s[6], s[7]));
        }
        __syncwarp();
        const uint4 low = ptx::load_shared(from), high = ptx::load_shared(from + 8 * 64);
        if (part * 32 + chunk_out * 8 < columns) {
            if (row_out < rows) *reinterpret_cast<uint4*>(out + part * 32) = low;
            if (row_out + 8 < rows) *reinterpret_cast<uint4*>(out + part * 32 + static_cast<i64>(8) * n) = high;
        }
        __syncwarp();
    }
}

// A warpgroup's way through all tiles. Rounds of the ring are unrolled: with every address known, the four wgmma of a
// K block follow each other closely enough to keep the warpgroups out of each other's way.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(SharedStorage& shared, u32 warpgroup)
        : shared_(shared),
          tokens_(wgmma::Descriptor::of(shared.tokens[0] + warpgroup * 64 * kBlockK)),
          weights_(wgmma::Descriptor::of(shared.weights[0])),
          row_(threadIdx.x / 32 * 16),
          first_row_(warpgroup * 64) {}

    __device__ __forceinline__ void run(u16* out, int n, int k_blocks) {
        float acc[kAccumulators] = {};
        Pipeline pipeline;
        for (int slot = 0;; slot = slot == kStages ? 0 : slot + 1) {
            ptx::mbarrier_wait(&shared_.full[pipeline.stage], pipeline.phase);
            const TileRecord& tile = shared_.tiles[slot];
            if (tile.rows < 0) break;
            int left = k_blocks;
            if (tile.rows <= first_row_) {  // too low for this warpgroup: let the stages go
                for (; left > 0; --left, pipeline.advance()) {
                    ptx::mbarrier_wait(&shared_.full[pipeline.stage], pipeline.phase);
                    release(&shared_.empty[pipeline.stage]);
                }
                continue;
            }
            float sum[kAccumulators] = {};
            while (left > 0) {
                if (pipeline.stage == 0 && left >= kStages) {
#pragma unroll
                    for (int stage = 0; stage < kStages; ++stage) accumulate(sum, acc, stage, pipeline.phase);
                    pipeline.phase ^= 1;
                    left -= kStages;
                } else {
                    accumulate(sum, acc, pipeline.stage, pipeline.phase);
                    pipeline.advance();
                    --left;
                }
            }
            store(sum, ptx::shared_address(shared_.staging) + row_ * 64, out + tile.offset + static_cast<i64>(row_) * n,
                  tile.rows - row_, tile.columns, n);
        }
    }

  private:
    // sum += a K block's product: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32.
    __device__ __forceinline__ void accumulate(float (&sum)[kAccumulators], float (&acc)[kAccumulators], int stage,
                                               u32 phase) {
        ptx::mbarrier_wait(&shared_.full[stage], phase);
        wgmma::multiply_block<kBlockN, true>(acc, tokens_ + stage * kBlockM * kBlockK, weights_ + stage * kBlockN * kBlockK);
        const float* scales = shared_.scales[stage] + row_ + threadIdx.x % 32 / 4;
        const float low = scales[0], high = scales[8];
        wgmma::wait(acc);
        release(&shared_.empty[stage]);
#pragma unroll
        for (int i = 0; i < kAccumulators; i += 4) {
            sum[i + 0] += acc[i + 0] * low;
            sum[i + 1] += acc[i + 1] * low;
            sum[i + 2] += acc[i + 2] * high;
            sum[i + 3] += acc[i + 3] * high;
        }
    }

    SharedStorage& shared_;
    const wgmma::Descriptor tokens_, weights_;
    const int row_, first_row_;  // of the warp and of the warpgroup in the tile
};

}  // namespace straight
