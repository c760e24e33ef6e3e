// Consumers for short groups: 128 rows of weights are wgmma's M (64 a warpgroup) and the tokens its N, in steps of 16.
// A group of 20 rows costs the tensor cores 32 and the epilogue 20; promotion reads a scale for every column.
#pragma once

#include "activation.cuh"
#include "storage.cuh"
#include "wgmma.cuh"

namespace swapped {

static_assert(!kSwapped || (kBlockM <= 64 && kCluster == 1), "heights up to 64 have code; a CTA without columns has none");

#if SWIGLU
// Activates a warpgroup's 64 columns of a tile, and writes its own rows in FP8; the other warpgroup has the other 64
// columns of the same scales.
template <int kSlices>
__device__ __forceinline__ void store(float (&sum)[2][kSlices * 8], Largest& largest, u32 staging, u32 warpgroup,
                                      const Output& output, const Tile& tile) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, r = lane / 4, c = lane % 4;
    activation::swiglu<kSlices * 8>(sum[0], sum[1], output);
#pragma unroll
    for (int i = 0; i < kSlices * 8; i += 4) {  // two tokens, and of each the columns r and r + 8 of the warp's
        float2 most = {ptx::max_or_nan(fabsf(sum[0][i]), fabsf(sum[0][i + 2])),
                       ptx::max_or_nan(fabsf(sum[0][i + 1]), fabsf(sum[0][i + 3]))};
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            most.x = ptx::max_or_nan(most.x, __shfl_xor_sync(0xffffffff, most.x, distance));
            most.y = ptx::max_or_nan(most.y, __shfl_xor_sync(0xffffffff, most.y, distance));
        }
        if (r == 0) *reinterpret_cast<float2*>(&largest.of_warp[warpgroup * 4 + warp][i * 2 + c * 2]) = most;
    }
    ptx::named_barrier<256>(3);
    const int row = output.row(tile);
    if (threadIdx.x < kSlices * 16) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = ptx::max_or_nan(most, largest.of_warp[i][threadIdx.x]);
        const float scale = activation::scale_of(most);
        largest.scale[threadIdx.x] = scale;
        if (threadIdx.x < tile.rows)
            output.scales[static_cast<i64>(tile.column / 128) * output.scale_stride + row + threadIdx.x] = scale;
    }
    ptx::named_barrier<256>(3);
#pragma unroll
    for (int i = 0; i < kSlices * 8; i += 4) {
        const int token = i * 2 + c * 2;
        const float2 scale = *reinterpret_cast<const float2*>(&largest.scale[token]);
        const float by_x = __frcp_rn(scale.x), by_y = __frcp_rn(scale.y);
        const u16 x = ptx::pack_e4m3(sum[0][i] * by_x, sum[0][i + 2] * by_x);
        const u16 y = ptx::pack_e4m3(sum[0][i + 1] * by_y, sum[0][i + 3] * by_y);
        const u32 place = staging + token * 64 + ((warp ^ c) * 16) + r;  // token / 2 % 4 is c
        ptx::store_shared(place, static_cast<u8>(x));
        ptx::store_shared(place + 8, static_cast<u8>(x >> 8));
        ptx::store_shared(place + 64, static_cast<u8>(y));
        ptx::store_shared(place + 64 + 8, static_cast<u8>(y >> 8));
    }
    ptx::named_barrier<128>(1 + warpgroup);
    u8* const out = output.out + static_cast<i64>(row) * output.n + tile.column + warpgroup * 64;
    for (int i = thread; i < tile.rows * 4; i += 128) {
        const int token = i / 4, chunk = i % 4;
        *reinterpret_cast<uint4*>(out + static_cast<i64>(token) * output.n + chunk * 16) =
            ptx::load_shared(staging + token * 64 + (chunk ^ token / 2 % 4) * 16);
    }
}
#else
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
#endif

// One tile of up to 16 * kSlices rows on one warpgroup: all of K, then the epilogue. Each height has its own code, so
// that the accumulators of a short tile are few and its wgmma narrow.
template <int kSlices>
__device__ __forceinline__ void consume(SharedStorage& shared, Pipeline& pipeline, const Tile& tile, u32 warpgroup,
                                        const Output& output, int k_blocks) {
    const auto weights = wgmma::Descriptor::of(shared.weights[0] + warpgroup * kScaleParts * 64 * kBlockK);
    const auto tokens = wgmma::Descriptor::of(shared.tokens[0]);
    const int lane = threadIdx.x % 32;
    float sum[kScaleParts][kSlices * 8] = {};
#pragma unroll 1  // unrolled, the accumulators of two K blocks would be alive at once
    for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
        const int stage = pipeline.index;
        float acc[kScaleParts][kSlices * 8];
        ptx::mbarrier_wait(&shared.full[stage], pipeline.phase);
#pragma unroll
        for (int part = 0; part < kScaleParts; ++part)
            wgmma::multiply_block<16 * kSlices, false>(acc[part], weights + (stage * kWeightRows + part * 64) * kBlockK,
                                                       tokens + stage * kBlockM * kBlockK);
#pragma unroll
        for (int part = 0; part < kScaleParts; ++part) wgmma::wait(acc[part]);

        // Promotion: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32. A column of the
        // fragment is a row of a; its scale comes already multiplied by the weights'.
#pragma unroll
        for (int part = 0; part < kScaleParts; ++part) {
            const float* scales = shared.scales[stage][part] + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < kSlices * 8; i += 4) {
                const float2 scale = *reinterpret_cast<const float2*>(scales + i * 2);
                sum[part][i + 0] += acc[part][i + 0] * scale.x;
                sum[part][i + 1] += acc[part][i + 1] * scale.y;
                sum[part][i + 2] += acc[part][i + 2] * scale.x;
                sum[part][i + 3] += acc[part][i + 3] * scale.y;
            }
        }
        release(&shared.empty[stage]);
    }
    const u32 staging = ptx::shared_address(shared.staging[warpgroup]);
#if SWIGLU
    store<kSlices>(sum, shared.largest, staging, warpgroup, output, tile);
#else
    const int column = tile.column + warpgroup * 64;
    store<kSlices>(sum[0], staging, warpgroup, output.out + static_cast<i64>(output.row(tile)) * output.n + column,
                   tile.rows, output.n - column, output.n);
#endif
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
