// Consumers for short groups: 128 rows of weights are wgmma's M (64 a warpgroup) and the tokens its N, in steps of 16.
// A group of 20 rows costs the tensor cores 32 and the epilogue 20; promotion reads a scale for every column.
#pragma once

#include "storage.cuh"
#include "wgmma.cuh"

namespace swapped {

static_assert(!kSwapped || (kBlockM <= 64 && kCluster == 1 && !kSwiglu),
              "heights up to 64 have code; a CTA without columns has none, and SwiGLU has none");

// Writes a warpgroup's 64 columns of a tile, 16 rows at a time through a swizzled buffer; only the tile's own rows.
template <int kSlices>
__device__ __forceinline__ void store(const float (&sum)[kSlices * 8], u32 staging, u32 warpgroup, u16* out, int rows,
                                      int columns, int n) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int row_in = lane / 16 * 8 + lane % 8, chunk_in = warp * 2 + lane / 8 % 2;
    const int row_out = thread / 8, chunk_out = thread % 8;
    const u32 in = staging + row_in * 128 + ((chunk_in ^ (row_in % 8)) * 16);
    const u32 from = staging + row_out * 128 + ((chunk_out ^ (row_out % 8)) * 16);
    out += static_cast<i64>(row_out) * n + chunk_out * 8;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
        const float* s = sum + slice * 8;
        const u32 buffer = slice % 2 * (kStagingBytes / 2);  // the other one was read before the barrier just passed
        ptx::stmatrix_transposed(in + buffer, ptx::pack_bf16(s[0], s[1]), ptx::pack_bf16(s[2], s[3]),
                                 ptx::pack_bf16(s[4], s[5]), ptx::pack_bf16(s[6], s[7]));
        ptx::named_barrier<128>(1 + warpgroup);
        if (slice * 16 + row_out < rows && chunk_out * 8 < columns)
            *reinterpret_cast<uint4*>(out + static_cast<i64>(slice) * 16 * n) = ptx::load_shared(from + buffer);
    }
    ptx::named_barrier<128>(1 + warpgroup);
}

// One tile of up to 16 * kSlices rows on one warpgroup: all of K, then the epilogue. Each height has its own code, so
// that the accumulators of a short tile are few and its wgmma narrow.
template <int kSlices>
__device__ __forceinline__ void consume(SharedStorage& shared, Pipeline& pipeline, const Tile& tile, u32 warpgroup,
                                        const Output& output, int k_blocks) {
    const auto weights = wgmma::Descriptor::of(shared.weights[0] + warpgroup * 64 * kBlockK);
    const auto tokens = wgmma::Descriptor::of(shared.tokens[0]);
    const int lane = threadIdx.x % 32;
    float sum[kSlices * 8] = {};
#pragma unroll 1  // unrolled, the accumulators of two K blocks would be alive at once
    for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
        const int stage = pipeline.index;
        float acc[kSlices * 8];
        ptx::mbarrier_wait(&shared.full[stage], pipeline.phase);
        wgmma::multiply_block<16 * kSlices, false>(acc, weights + stage * kWeightRows * kBlockK, tokens + stage * kBlockM * kBlockK);
        wgmma::wait(acc);

        // Promotion: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32. A column of the
        // fragment is a row of a; its scale comes already multiplied by the weights'.
        const float* scales = shared.scales[stage][0] + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kSlices * 8; i += 4) {
            const float2 scale = *reinterpret_cast<const float2*>(scales + i * 2);
            sum[i + 0] += acc[i + 0] * scale.x;
            sum[i + 1] += acc[i + 1] * scale.y;
            sum[i + 2] += acc[i + 2] * scale.x;
            sum[i + 3] += acc[i + 3] * scale.y;
        }
        release(&shared.empty[stage]);
    }
    const int column = tile.column + warpgroup * 64;
    store<kSlices>(sum, ptx::shared_address(shared.staging[warpgroup]), warpgroup,
                   output.out + static_cast<i64>(output.row(tile)) * output.n + column, tile.rows, output.n - column,
                   output.n);
}

// All tiles of a warpgroup.
__device__ __forceinline__ void consume_all(SharedStorage& shared, u32 warpgroup, const Output& output, int k_blocks) {
    Pipeline pipeline;
    for (Walk walk;; walk.advance()) {
        ptx::mbarrier_wait(&shared.announced[walk.index], walk.phase);
        const Tile tile = shared.tiles[walk.index];
        if (tile.rows < 0) break;
        switch ((tile.rows + 15) / 16) {
#define HEIGHT(S)                                                                                             \
    case S:                                                                                                   \
        if constexpr (S <= kBlockM / 16) consume<S>(shared, pipeline, tile, warpgroup, output, k_blocks);  \
        break;
            HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4)
#undef HEIGHT
        }
    }
}

}  // namespace swapped
