// The consumer for weights of four bits: as in consumer_swap_ab.cuh the tile's 128 rows of b are wgmma's M, but come
// from registers, where a warpgroup decodes a K block while the tensor cores multiply the one before.
#pragma once

#include "codes.cuh"
#include "consumer_swap_ab.cuh"
#include "pipeline.cuh"
#include "wgmma_fragments.cuh"

namespace codes {

static_assert(!kMxfp4 || (kSwapAb && kBlockN == 128 && (kBlockM == 64 || kBlockM == 128)),
              "there is code for 128 rows of b, and heights up to 64 or 128");

// A warpgroup's part of a tile.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(SharedStorage& shared, u32 warpgroup)
        : shared_(shared), warpgroup_(warpgroup), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

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
        float sum[kRegisters] = {};
        const auto promote = [&](const float (&acc)[kRegisters], int stage) {
            swap_ab::promote(sum, acc, shared_.scales[stage][0] + lane_ % 4 * 2);
            shared_.release(stage);
        };
        if constexpr (kSlices <= 4) {
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
                promote(product.d, done.index);
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
                promote(acc, stage);
            };
            decode_first();
#pragma unroll 1
            for (int left = k_blocks; left > 1; --left) multiply(false);
            multiply(true);
        }
        epilogue.template store<kSlices>(sum, tile, warpgroup_);
    }

    SharedStorage& shared_;
    const u32 warpgroup_;
    const int warp_, lane_;
};

}  // namespace codes
