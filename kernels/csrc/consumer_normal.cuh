// The consumer for tall groups: 64 rows of a per warpgroup are wgmma's M and the tile's 128 rows of b its N. A thread
// needs two scales per K block, so promotion hardly loads shared memory.
#pragma once

#include "config.cuh"
#include "storage.cuh"
#include "wgmma.cuh"

namespace normal {

constexpr int kAccumulators = kBlockN / 2;

// A warpgroup's loop over all tiles. A round of the ring is unrolled: with every address known, the four wgmma of a K
// block follow each other closely enough to keep the warpgroups out of each other's way.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(SharedStorage& shared, u32 warpgroup)
        : shared_(shared),
          a_(wgmma::Descriptor::of(shared.a[0] + warpgroup * 64 * kBlockK)),
          b_(wgmma::Descriptor::of(shared.b[0])),
          row_(threadIdx.x / 32 * 16),
          first_row_(warpgroup * 64) {}

    template <typename Epilogue>
    __device__ __forceinline__ void run(Epilogue& epilogue, const Problem& problem) {
        Pipeline pipeline;
        for (Walk walk;; walk.advance()) {
            const Tile tile = announced_tile(shared_, walk, problem);
            if (tile.rows < 0) break;
            int left = problem.k_blocks;
            if (tile.rows <= first_row_ || tile.column >= problem.n) {  // nothing to compute: only release the stages
                for (; left > 0; --left, pipeline.advance()) {
                    ptx::mbarrier_wait(&shared_.full[pipeline.index], pipeline.phase);
                    release(&shared_.empty[pipeline.index]);
                }
                continue;
            }
            float sum[kAccumulators] = {}, acc[kAccumulators] = {};
            const bool whole = tile.column % 128 == 0;
            while (left > 0) {
                if (pipeline.index == 0 && left >= kStages) {
#pragma unroll
                    for (int stage = 0; stage < kStages; ++stage) accumulate(sum, acc, stage, pipeline.phase, whole);
                    pipeline.phase ^= 1;
                    left -= kStages;
                } else {
                    accumulate(sum, acc, pipeline.index, pipeline.phase, whole);
                    pipeline.advance();
                    --left;
                }
            }
            epilogue.store(sum, tile);
        }
        epilogue.finish();
    }

  private:
    // sum += a K block's product: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32.
    // whole: the first 128 of 192 columns share a scale of b; else the first 64 do, and the next 128.
    __device__ __forceinline__ void accumulate(float (&sum)[kAccumulators], float (&acc)[kAccumulators], int stage,
                                               u32 phase, bool whole) {
        ptx::mbarrier_wait(&shared_.full[stage], phase);
        wgmma::multiply_block<kBlockN, true>(acc, a_ + stage * kBlockM * kBlockK, b_ + stage * kBlockN * kBlockK);
        const float* scales = shared_.scales[stage][0] + row_ + threadIdx.x % 32 / 4;
        float low[kScaleParts], high[kScaleParts];
        low[0] = scales[0];
        high[0] = scales[8];
        if constexpr (kScaleParts == 2 && !kSwiglu) {
            low[1] = scales[kBlockM];
            high[1] = scales[kBlockM + 8];
        }
        wgmma::wait(acc);
        if constexpr (kSwiglu) {  // no earlier: there are no registers for them
            low[1] = scales[kBlockM];
            high[1] = scales[kBlockM + 8];
        }
        release(&shared_.empty[stage]);
        constexpr int kParts = (kAccumulators + 31) / 32;  // of 64 columns
        float by_low[kParts], by_high[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const bool first = kScaleParts == 1 || part == 0 || (kParts == 3 && part == 1 && whole);
            by_low[part] = first ? low[0] : low[kScaleParts - 1];
            by_high[part] = first ? high[0] : high[kScaleParts - 1];
        }
#pragma unroll
        for (int i = 0; i < kAccumulators; i += 4) {
            sum[i + 0] += acc[i + 0] * by_low[i / 32];
            sum[i + 1] += acc[i + 1] * by_low[i / 32];
            sum[i + 2] += acc[i + 2] * by_high[i / 32];
            sum[i + 3] += acc[i + 3] * by_high[i / 32];
        }
    }

    SharedStorage& shared_;
    const wgmma::Descriptor a_, b_;
    const int row_, first_row_;  // where the warp and the warpgroup start in the tile
};

}  // namespace normal
