// Consumers for tall groups: 64 tokens a warpgroup are wgmma's M and the tile's 128 columns its N. A thread needs two
// scales a K block, so promotion costs the shared memory next to nothing.
#pragma once

#include "epilogue.cuh"
#include "storage.cuh"
#include "wgmma.cuh"

namespace straight {

constexpr int kAccumulators = kWeightRows / 2;

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
        Pipeline pipeline;
#if SWIGLU
        u32 turn = 0;  // tiles whose rows' largest numbers were exchanged
#endif
        for (Walk walk;; walk.advance()) {
            ptx::mbarrier_wait(&shared_.announced[walk.index], walk.phase);
            const Tile tile = part_of(shared_.tiles[walk.index], output.rank);
            if (tile.rows < 0) break;
            int left = k_blocks;
            if (tile.rows <= first_row_ || tile.column >= output.n) {  // nothing here: let the stages go
                for (; left > 0; --left, pipeline.advance()) {
                    ptx::mbarrier_wait(&shared_.full[pipeline.index], pipeline.phase);
                    release(&shared_.empty[pipeline.index]);
                }
                continue;
            }
            float sum[kAccumulators] = {}, acc[kAccumulators] = {};
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
            const u32 staging = ptx::shared_address(shared_.staging) + row_ * (kStagingBytes / 64);
#if SWIGLU
            store_activated(sum, shared_.largest, turn, staging, output, output.row(tile) + row_, tile.rows - row_, tile.column);
        }
#else
            store_rows(sum, staging, output, output.row(tile) + row_, tile.rows - row_, tile.column);
        }
        ptx::wait_bulk_stores();  // they read shared memory that ends with the CTA
#endif
    }

  private:
    // sum += a K block's product: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32.
    __device__ __forceinline__ void accumulate(float (&sum)[kAccumulators], float (&acc)[kAccumulators], int stage,
                                               u32 phase) {
        ptx::mbarrier_wait(&shared_.full[stage], phase);
        wgmma::multiply_block<kWeightRows, true>(acc, tokens_ + stage * kBlockM * kBlockK, weights_ + stage * kWeightRows * kBlockK);
        const float* scales = shared_.scales[stage][0] + row_ + threadIdx.x % 32 / 4;
        float low[kScaleParts], high[kScaleParts];
        low[0] = scales[0];
        high[0] = scales[8];
        wgmma::wait(acc);
        if constexpr (kScaleParts == 2) {  // not before: there are no registers for them
            low[1] = scales[kBlockM];
            high[1] = scales[kBlockM + 8];
        }
        release(&shared_.empty[stage]);
#pragma unroll
        for (int i = 0; i < kAccumulators; i += 4) {
            const int part = i * kScaleParts / kAccumulators;
            sum[i + 0] += acc[i + 0] * low[part];
            sum[i + 1] += acc[i + 1] * low[part];
            sum[i + 2] += acc[i + 2] * high[part];
            sum[i + 3] += acc[i + 3] * high[part];
        }
    }

    SharedStorage& shared_;
    const wgmma::Descriptor tokens_, weights_;
    const int row_, first_row_;  // of the warp and of the warpgroup in the tile
};

}  // namespace straight
