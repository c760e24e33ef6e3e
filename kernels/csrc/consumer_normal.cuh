// The consumer for tall groups: 64 rows of a per warpgroup are wgmma's M and the tile's rows of b its N. A thread needs
// two scales per K block and 128 columns, so promotion hardly loads shared memory.
#pragma once

#include "config.cuh"
#include "storage.cuh"
#include "wgmma.cuh"

namespace normal {

constexpr int kAccumulators = kBlockN / 2;
constexpr int kAligned = kBlockN % 64 == 0 ? 32 : 16;                   // accumulators per scale of b, at least
constexpr bool kInPairs = kAccumulators <= 48 || kConsumerGroups == 1;  // others have no registers for two K blocks
using Accumulators = float[kAccumulators];

// A warpgroup's loop over all tiles.
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
            // Through a shuffle the compiler knows that the warp agrees; else it would wait after each wgmma of a pair.
            const bool computes = tile.rows > first_row_ && tile.column < problem.n;
            if (!__shfl_sync(0xffffffff, computes, 0)) {  // only release the stages
                for (int left = problem.k_blocks; left > 0; --left, pipeline.advance()) {
                    ptx::mbarrier_wait(&shared_.full[pipeline.index], pipeline.phase);
                    release(&shared_.empty[pipeline.index]);
                }
                continue;
            }
            Accumulators sum = {};
            if constexpr (!kSwiglu) second_ = 128 - tile.column % 128;
            if constexpr (kInPairs)
                multiply_in_pairs(sum, pipeline, problem.k_blocks);
            else
                multiply_by_rounds(sum, pipeline, problem.k_blocks);
            epilogue.store(sum, tile);
        }
        epilogue.finish();
    }

  private:
    // Two K blocks in flight.
    __device__ __forceinline__ void multiply_in_pairs(Accumulators& sum, Pipeline& pipeline, int k_blocks) {
        Accumulators acc[2];  // not set to 0: ptxas would wait for the first product before it sets the second
        Pipeline done = pipeline;
        const auto multiply = [&](Accumulators& acc) {
            start(acc, pipeline.index, pipeline.phase);
            pipeline.advance();
        };
        const auto promote_next = [&](const Accumulators& acc) {
            const Scales scales = scales_of(done.index);
            release(&shared_.empty[done.index]);
            promote(sum, acc, scales);
            done.advance();
        };
        wgmma::in_pairs(acc, k_blocks, multiply, promote_next);
    }

    // A round of the ring is unrolled: with every address known, the four wgmma of a K block follow each other closely
    // enough to keep the warpgroups out of each other's way.
    __device__ __forceinline__ void multiply_by_rounds(Accumulators& sum, Pipeline& pipeline, int left) {
        Accumulators acc = {};
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
    }

    __device__ __forceinline__ void accumulate(Accumulators& sum, Accumulators& acc, int stage, u32 phase) {
        start(acc, stage, phase);
        Scales scales;
        if constexpr (!kSwiglu) scales = scales_of(stage);
        wgmma::wait(acc);
        if constexpr (kSwiglu) scales = scales_of(stage);  // no earlier: there are no registers for them
        release(&shared_.empty[stage]);
        promote(sum, acc, scales);
    }

    // Of rows r and r + 8, for each of the tile's parts with scales of its own.
    struct Scales {
        float low[kScaleParts], high[kScaleParts];
    };

    __device__ __forceinline__ void start(Accumulators& acc, int stage, u32 phase) {
        ptx::mbarrier_wait(&shared_.full[stage], phase);
        wgmma::multiply_block<kBlockN, true>(acc, a_ + stage * kBlockM * kBlockK, b_ + stage * kBlockN * kBlockK);
    }

    __device__ __forceinline__ Scales scales_of(int stage) const {
        Scales scales;
#pragma unroll
        for (int part = 0; part < kScaleParts; ++part) {
            const float* of_row = shared_.scales[stage][part] + row_ + threadIdx.x % 32 / 4;
            scales.low[part] = of_row[0];
            scales.high[part] = of_row[8];
        }
        return scales;
    }

    // sum += a K block's product: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32. The
    // tile's parts are the gates and the ups, or the columns before and after a multiple of 128.
    __device__ __forceinline__ void promote(Accumulators& sum, const Accumulators& acc, const Scales& scales) const {
#pragma unroll
        for (int i = 0; i < kAccumulators; i += 4) {
            const bool first = kScaleParts == 1 || (kSwiglu ? i < 32 : i / kAligned * kAligned * 2 < second_);
            const float low = first ? scales.low[0] : scales.low[kScaleParts - 1];
            const float high = first ? scales.high[0] : scales.high[kScaleParts - 1];
            sum[i + 0] += acc[i + 0] * low;
            sum[i + 1] += acc[i + 1] * low;
            sum[i + 2] += acc[i + 2] * high;
            sum[i + 3] += acc[i + 3] * high;
        }
    }

    SharedStorage& shared_;
    const wgmma::Descriptor a_, b_;
    const int row_, first_row_;  // where the warp and the warpgroup start in the tile
    int second_ = 0;             // the tile's column from where on the next scale of b applies
};

}  // namespace normal
