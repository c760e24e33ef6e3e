// The consumer for short groups: the tile's 128 rows of b are wgmma's M (64 per warpgroup) and its rows of a the N, in
// steps of 16. A group of 20 rows costs the tensor cores 32 and the epilogue 20; promotion reads a scale per column.
#pragma once

#include "pipeline.cuh"
#include "wgmma.cuh"

namespace swap_ab {

static_assert(!kSwapAb || kFourBits || ((kBlockM == 32 || kBlockM == 64) && kCluster == 1 && !kGlu),
              "there is code for heights up to 64, none for a CTA without columns and none for SwiGLU");

// Promotion: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32. A column of the fragment is a
// row of a; its scale is already multiplied by that of b. `scales`: from this lane's first column on.
template <int kCount>
__device__ __forceinline__ void promote(float (&sum)[kCount], const float (&acc)[kCount], const float* scales) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + i * 2);
        sum[i + 0] += acc[i + 0] * scale.x;
        sum[i + 1] += acc[i + 1] * scale.y;
        sum[i + 2] += acc[i + 2] * scale.x;
        sum[i + 3] += acc[i + 3] * scale.y;
    }
}

// A warpgroup's part of a tile.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(SharedStorage& shared, u32 warpgroup)
        : shared_(shared), warpgroup_(warpgroup) {}

    template <typename Epilogue>
    __device__ __forceinline__ void compute(Epilogue& epilogue, StageRing& stage_ring, const Tile& tile, int k_blocks) {
        switch ((tile.rows + 15) / 16) {
            case 1: multiply<1>(epilogue, stage_ring, tile, k_blocks); break;
            case 2: multiply<2>(epilogue, stage_ring, tile, k_blocks); break;
            case 3:
                if constexpr (kBlockM > 32) multiply<3>(epilogue, stage_ring, tile, k_blocks);
                break;
            case 4:
                if constexpr (kBlockM > 32) multiply<4>(epilogue, stage_ring, tile, k_blocks);
                break;
        }
    }

  private:
    // One tile of up to 16 * kSlices rows: all of K, then the epilogue. Each height has its own code, so that a short
    // tile has few accumulators and a narrow wgmma.
    template <int kSlices, typename Epilogue>
    __device__ __forceinline__ void multiply(Epilogue& epilogue, StageRing& stage_ring, const Tile& tile,
                                             int k_blocks) {
        const auto b = wgmma::Descriptor::of(shared_.b[0] + warpgroup_ * 64 * kBlockK);
        const auto a = wgmma::Descriptor::of(shared_.a[0]);
        const int lane = threadIdx.x % 32;
        float sum[kSlices * 8] = {}, acc[2][kSlices * 8] = {};
        StageRing done = stage_ring;
        const auto multiply = [&](float (&d)[kSlices* 8]) {
            shared_.wait_full(stage_ring);
            wgmma::multiply_block<16 * kSlices>(d, b + stage_ring.index * kBlockN * kBlockK,
                                                a + stage_ring.index * kBlockM * kBlockK);
            stage_ring.advance();
        };
        const auto promote_next = [&](const float (&acc)[kSlices* 8]) {
            promote(sum, acc, shared_.scales[done.index][0] + lane % 4 * 2);
            shared_.release(done.index);
            done.advance();
        };
        wgmma::in_pairs(acc, k_blocks, multiply, promote_next);
        epilogue.template store<kSlices>(sum, tile, warpgroup_);
    }

    SharedStorage& shared_;
    const u32 warpgroup_;
};

}  // namespace swap_ab
