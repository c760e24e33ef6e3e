// The consumer for weights of four bits: as in consumer_swap_ab.cuh the tile's 128 rows of b are wgmma's M, but come
// from registers, where a warpgroup decodes a K block while the tensor cores multiply the one before.
#pragma once

#include "codes.cuh"
#include "consumer_swap_ab.cuh"
#include "pipeline.cuh"
#include "wgmma_fragments.cuh"

namespace codes {

static_assert(!kFourBits || (kSwapAb && kBlockN == 128 && (kBlockM == 64 || (kBlockM == 128 && kProducts == 1))),
              "there is code for 128 rows of b, and heights up to 64, or 128 if a K block has one product");

// A warpgroup's part of a tile.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(SharedStorage& shared, u32 warpgroup, const Problem& problem,
                                        const float* row_scales)
        : shared_(shared),
          warpgroup_(warpgroup),
          warp_(threadIdx.x / 32),
          lane_(threadIdx.x % 32),
          problem_(problem),
          row_scales_(row_scales) {}

    __device__ __forceinline__ bool computes(const Tile& tile, const Problem& problem) const {
        return tile.column < problem.n;
    }

    template <typename Epilogue>
    __device__ __forceinline__ void compute(Epilogue& epilogue, StageRing& stage_ring, const Tile& tile, int k_blocks) {
        const int slices = (tile.rows + 15) / 16;
        if (slices == 1)
            multiply<1>(epilogue, stage_ring, tile, k_blocks);
        else if (slices == 2)
            multiply<2>(epilogue, stage_ring, tile, k_blocks);
        else if (slices <= 4)
            multiply<4>(epilogue, stage_ring, tile, k_blocks);
        else if constexpr (kBlockM > 64)
            multiply<8>(epilogue, stage_ring, tile, k_blocks);
    }

  private:
    // One tile of up to 16 * kSlices rows: all of K, then the epilogue.
    template <int kSlices, typename Epilogue>
    __device__ __forceinline__ void multiply(Epilogue& epilogue, StageRing& stage_ring, const Tile& tile,
                                             int k_blocks) {
        constexpr int kRegisters = kSlices * 8;
        const auto a = wgmma::Descriptor::of(shared_.a[0]);
        float sum[kRegisters] = {}, of_rows[2];
        if constexpr (kScalesProducts) {  // loaded long before they are needed
            const float* const rows = row_scales_ + block_of(problem_, tile) * kBlockN + warp_ * 16 + lane_ / 4;
            of_rows[0] = __ldg(rows), of_rows[1] = __ldg(rows + 8);
        }
        if constexpr (kProducts > 1) {
            // Products of a K block are multiplied by scales and added up before the block is promoted: some are in
            // flight, in accumulators of their own, while as many before them are added.
            constexpr int kOfHalf = kProducts / 2, kRegistersFor = 4 / kSlices;
            constexpr int kTogether = kOfHalf < kRegistersFor ? kOfHalf : kRegistersFor;
            constexpr int kSteps = kProducts / kTogether;
            float block[kRegisters], acc[2][kTogether][kRegisters] = {};
            u32 fragments[2][kFragments] = {};  // of a K block's halves
            const auto decode_first = [&] {
                shared_.wait_full(stage_ring);
                decode<0>(fragments[0], shared_.b[stage_ring.index], warp_, lane_);
            };
            const auto start = [&](int step, int stage) {
                ptx::wgmma_fence();
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const int index = step * kTogether + i;
                    wgmma::Multiply<16 * kSlices>::restart(
                        acc[step % 2][i], fragments[index / kOfHalf] + index % kOfHalf * 4,
                        a + (stage * kBlockM * kBlockK + index * 4 / kProducts * 32));
                }
                ptx::wgmma_commit();
            };
            const auto add = [&](int step, const RowScales& scales) {
#pragma unroll
                for (int i = 0; i < kTogether; ++i) add_scaled(block, acc[step % 2][i], scales, step * kTogether + i);
                wgmma::keep(block);  // computed here, before the next product overwrites what it is computed from
            };
            const auto multiply = [&](bool is_last) {
                const int stage = stage_ring.index;
                start(0, stage);
                const auto scales = RowScales::of(shared_.b[stage], warp_, lane_);
#pragma unroll
                for (int step = 1; step < kSteps; ++step) {
                    if (step == kSteps / 2) decode<1>(fragments[1], shared_.b[stage], warp_, lane_);
                    start(step, stage);
                    wgmma::wait<1>(acc[(step - 1) % 2]);
                    if (step == kSteps / 2) wgmma::keep(fragments[0]);
                    add(step - 1, scales);
                }
                stage_ring.advance();
                if (!is_last) decode_first();
                wgmma::wait<0>(acc[1]);
                wgmma::keep(fragments[1]);
                add(kSteps - 1, scales);
                swap_ab::promote(sum, block, shared_.scales[stage][0] + lane_ % 4 * 2);
                shared_.release(stage);
            };
            decode_first();
#pragma unroll 1
            for (int left = k_blocks; left > 1; --left) multiply(false);
            multiply(true);
        } else if constexpr (kSlices <= 4) {
            using Product = wgmma::Product<kRegisters>;
            Product products[2] = {};
            StageRing done = stage_ring;
            const auto multiply = [&](Product& product) {
                const int stage = stage_ring.index;
                shared_.wait_full(stage_ring);
                decode<0>(product.a, shared_.b[stage], warp_, lane_);
                decode<1>(product.a + 8, shared_.b[stage], warp_, lane_);
                wgmma::multiply_block<16 * kSlices>(product.d, product.a, a + stage * kBlockM * kBlockK);
                stage_ring.advance();
            };
            const auto promote_next = [&](const Product& product) {
                promote(sum, product.d, done.index);
                done.advance();
            };
            wgmma::in_pairs(products, k_blocks, multiply, promote_next);
        } else {
            // There are registers for one product and one K block of b: the tensor cores multiply one half of it while
            // the other half of it, or the first half of the next one, is decoded.
            float acc[kRegisters] = {};
            u32 first[8], last[8];
            const auto decode_first = [&] {
                shared_.wait_full(stage_ring);
                decode<0>(first, shared_.b[stage_ring.index], warp_, lane_);
            };
            const auto multiply = [&](bool is_last) {
                const int stage = stage_ring.index;
                wgmma::multiply_half<16 * kSlices, true>(acc, first, a + stage * kBlockM * kBlockK);
                decode<1>(last, shared_.b[stage], warp_, lane_);
                wgmma::multiply_half<16 * kSlices, false>(acc, last, a + (stage * kBlockM * kBlockK + 64));
                stage_ring.advance();
                wgmma::wait_for_fragments<1>(first);
                if (!is_last) decode_first();
                wgmma::wait_for_fragments<0>(last);
                wgmma::wait(acc);
                promote(sum, acc, stage);
            };
            decode_first();
#pragma unroll 1
            for (int left = k_blocks; left > 1; --left) multiply(false);
            multiply(true);
        }
        if constexpr (kScalesProducts) {
#pragma unroll
            for (int i = 0; i < kRegisters; ++i) sum[i] *= of_rows[i % 4 / 2];
        }
        epilogue.template store<kSlices>(sum, tile, warpgroup_);
    }

    // Adds a K block's product, and releases its stage.
    template <int kCount>
    __device__ __forceinline__ void promote(float (&sum)[kCount], const float (&acc)[kCount], int stage) {
        const float* const scales = shared_.scales[stage][0] + lane_ % 4 * 2;
        if constexpr (kScalesProducts) {
            float scaled[kCount];
            add_scaled(scaled, acc, RowScales::of(shared_.b[stage], warp_, lane_), 0);
            swap_ab::promote(sum, scaled, scales);
        } else {
            swap_ab::promote(sum, acc, scales);
        }
        shared_.release(stage);
    }

    SharedStorage& shared_;
    const u32 warpgroup_;
    const int warp_, lane_;
    const Problem& problem_;
    const float* const row_scales_;
};

}  // namespace codes
