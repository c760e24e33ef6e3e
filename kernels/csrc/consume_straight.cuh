// Consumers for tall groups: 64 tokens a warpgroup are wgmma's M and the tile's 128 columns its N. A thread needs two
// scales a K block, so promotion costs the shared memory next to nothing.
#pragma once

#include "storage.cuh"
#include "wgmma.cuh"

namespace straight {

constexpr int kAccumulators = kBlockN / 2;

// Sends a warp's 16 rows of a tile off to memory; the copies go on under the next tile's multiplications. A row is a
// copy of its own, so that none is written that is not the tile's.
__device__ __forceinline__ void store(const float (&sum)[kAccumulators], u32 staging, u16* out, int rows, int columns,
                                      int n) {
    const int lane = threadIdx.x % 32;
    ptx::wait_bulk_stores_read();  // of the tile before: its rows lie in the same place
    __syncwarp();
    const u32 to = staging + lane % 16 * kStagingPitch + lane / 16 * 16;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 8) {
        ptx::stmatrix(to + i * 4, ptx::pack_bf16(sum[i], sum[i + 1]), ptx::pack_bf16(sum[i + 2], sum[i + 3]),
                      ptx::pack_bf16(sum[i + 4], sum[i + 5]), ptx::pack_bf16(sum[i + 6], sum[i + 7]));
    }
    ptx::fence_writes_for_copies();
    __syncwarp();
    if (lane < min(rows, 16))
        ptx::bulk_store(out + static_cast<i64>(lane) * n, staging + lane * kStagingPitch, min(columns, kBlockN) * 2);
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

    __device__ __forceinline__ void run(const Output& output, int k_blocks) {
        float acc[kAccumulators] = {};
        Pipeline pipeline;
        for (Walk walk;; walk.advance()) {
            ptx::mbarrier_wait(&shared_.announced[walk.index], walk.phase);
            const Tile tile = shared_.tiles[walk.index];
            if (tile.rows < 0) break;
            int left = k_blocks;
            if (tile.rows <= first_row_ || output.columns(tile) <= 0) {  // nothing here: let the stages go
                for (; left > 0; --left, pipeline.advance()) {
                    ptx::mbarrier_wait(&shared_.full[pipeline.index], pipeline.phase);
                    release(&shared_.empty[pipeline.index]);
                }
                continue;
            }
            float sum[kAccumulators] = {};
            while (left > 0) {
                if (pipeline.index == 0 && left >= kStages) {
#pragma unroll
                    for (int stage = 0; stage < kStages; ++stage) accumulate(sum, acc, stage, pipeline.phase);
                    pipeline.phase ^= 1;
                    left -= kStages;
                } else {
                    accumulate(sum, acc, pipeline.index, pipeline.phase);
                    pipeline.advance();
                    --left;
                }
            }
            store(sum, ptx::shared_address(shared_.staging) + row_ * kStagingPitch,
                  output.at(tile) + static_cast<i64>(row_) * output.n, tile.rows - row_, output.columns(tile), output.n);
        }
        ptx::wait_bulk_stores();  // they read shared memory that ends with the CTA
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
