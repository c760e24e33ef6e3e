// The consumer for tall groups: 64 rows of a per warpgroup are wgmma's M and the tile's rows of b its N. A thread needs
// two scales per K block and 128 columns, so promotion hardly loads shared memory. Of 256 columns it multiplies one
// half after the other, with the accumulators of one.
#pragma once

#include "pipeline.cuh"
#include "wgmma.cuh"

namespace normal {

constexpr int kHalves = kBlockN == 256 ? 2 : 1;
constexpr int kAccumulators = kBlockN / 2 / kHalves;
constexpr int kAligned = kBlockN % 64 == 0 ? 32 : 16;  // accumulators per scale of b, at least
// Two K blocks in flight, where there are registers for them and no other CTA that multiplies meanwhile.
constexpr bool kInPairs = kHalves == 1 && kCtasPerSm == 1 && (kAccumulators <= 48 || kConsumerGroups == 1);
using Accumulators = float[kAccumulators];
using Sums = float[kHalves * kAccumulators];

// A warpgroup's part of a tile.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(SharedStorage& shared, u32 warpgroup)
        : shared_(shared), first_row_(warpgroup * 64) {}

    // Whether the tile has rows and columns for this warpgroup. Through a shuffle the compiler knows that the warp
    // agrees; else it would wait after each wgmma of a pair.
    __device__ __forceinline__ bool computes(const Tile& tile, const Problem& problem) const {
        return __shfl_sync(0xffffffff, tile.rows > first_row_ && tile.column < problem.n, 0);
    }

    template <typename Epilogue>
    __device__ __forceinline__ void compute(Epilogue& epilogue, StageRing& stage_ring, const Tile& tile, int k_blocks) {
        Sums sum = {};
        if constexpr (!kGlu) second_ = floats::kScaleBlock - tile.column % floats::kScaleBlock;
        if constexpr (kInPairs)
            multiply_in_pairs(sum, stage_ring, k_blocks);
        else
            multiply_by_rounds(sum, stage_ring, k_blocks);
        epilogue.store(sum, tile);
    }

  private:
    // Two K blocks in flight.
    __device__ __forceinline__ void multiply_in_pairs(Sums& sum, StageRing& stage_ring, int k_blocks) {
        Accumulators acc[2];  // not set to 0: ptxas would wait for the first product before it sets the second
        StageRing done = stage_ring;
        const auto multiply_next = [&](Accumulators& acc) {
            shared_.wait_full(stage_ring);
            multiply(acc, stage_ring.index);
            stage_ring.advance();
        };
        const auto promote_next = [&](const Accumulators& acc) {
            const Scales scales = scales_of(done.index);
            shared_.release(done.index);
            promote(sum, acc, scales);
            done.advance();
        };
        wgmma::in_pairs(acc, k_blocks, multiply_next, promote_next);
    }

    // A round of the ring is unrolled: with every address known, the four wgmma of a K block follow each other closely
    // enough to keep the warpgroups out of each other's way.
    __device__ __forceinline__ void multiply_by_rounds(Sums& sum, StageRing& stage_ring, int left) {
        Accumulators acc = {};
        while (left > 0) {
            if (stage_ring.index == 0 && left >= kStages) {
#pragma unroll
                for (int stage = 0; stage < kStages; ++stage) accumulate(sum, acc, stage, stage_ring.phase);
                stage_ring.phase ^= 1;
                left -= kStages;
            } else {
                accumulate(sum, acc, stage_ring.index, stage_ring.phase);
                stage_ring.advance();
                --left;
            }
        }
    }

    __device__ __forceinline__ void accumulate(Sums& sum, Accumulators& acc, int stage, u32 phase) {
        shared_.wait_full({stage, phase});
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            multiply(acc, stage, half);
            Scales scales;
            if constexpr (!kGlu) scales = scales_of(stage);
            wgmma::wait(acc);
            if constexpr (kGlu) scales = scales_of(stage);  // no earlier: there are no registers for them
            if (half == kHalves - 1) shared_.release(stage);
            promote(sum, acc, scales, half);
        }
    }

    // Of rows r and r + 8, for each of the tile's parts with scales of its own.
    struct Scales {
        float low[kScaleParts], high[kScaleParts];
    };

    // Begins to multiply the stage's rows of a by a half of its rows of b.
    __device__ __forceinline__ void multiply(Accumulators& acc, int stage, int half = 0) const {
        wgmma::multiply_block<kBlockN / kHalves>(acc, a_ + stage * kBlockM * kBlockK,
                                                 b_ + (stage * kHalves + half) * (kBlockN / kHalves) * kBlockK);
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
    // tile's parts are the gates and the ups, its halves, or the columns before and after a multiple of 128.
    __device__ __forceinline__ void promote(Sums& sums, const Accumulators& acc, const Scales& scales,
                                            int half = 0) const {
        float* const sum = sums + half * kAccumulators;
#pragma unroll
        for (int i = 0; i < kAccumulators; i += 4) {
            const bool first = is_first_part(i, half);
            const float low = first ? scales.low[0] : scales.low[kScaleParts - 1];
            const float high = first ? scales.high[0] : scales.high[kScaleParts - 1];
            sum[i + 0] += acc[i + 0] * low;
            sum[i + 1] += acc[i + 1] * low;
            sum[i + 2] += acc[i + 2] * high;
            sum[i + 3] += acc[i + 3] * high;
        }
    }

    // Whether accumulator i belongs to the tile's first part.
    __device__ __forceinline__ bool is_first_part(int i, int half) const {
        if constexpr (kHalves == 2) return half == 0;
        if constexpr (kGlu) return i < 32;
        return kScaleParts == 1 || i / kAligned * kAligned * 2 < second_;
    }

    SharedStorage& shared_;
    const int first_row_;  // where the warpgroup starts in the tile
    const wgmma::Descriptor a_ = wgmma::Descriptor::of(shared_.a[0] + first_row_ * kBlockK);
    const wgmma::Descriptor b_ = wgmma::Descriptor::of(shared_.b[0]);
    const int row_ = threadIdx.x / 32 * 16;  // where the warp starts
    int second_ = 0;                         // the tile's column from where on the next scale of b applies
};

}  // namespace normal
