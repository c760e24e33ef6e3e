// Writes results to memory: one Epilogue per kind of output, all with the same interface.
//
//   Element              element type of out
//   Output               kernel parameters that describe the destination
//   Shared               the epilogue's part of the CTA's shared memory, barriers included
//   store(sum, tile)     stores what a warp, or with swap-AB a warpgroup, has accumulated for its part of the tile
//   finish()             is called after the last tile
#pragma once

#include "config.cuh"
#include "floats.cuh"
#include "ptx.cuh"

template <bool kWithSwapAb, bool kWithSwiglu>
class Epilogue;

using TileEpilogue = Epilogue<kSwapAb, kSwiglu>;

// ---------------------------------------------------------------- normal: 16 rows per warp, stored by TMA
template <>
class Epilogue<false, false> {
  public:
    using Element = u16;  // bf16
    static constexpr int kBoxes = (kBlockN + 63) / 64;
    static constexpr u32 kBoxBytes = 16 * 128;
    struct Output {
        Element* const out;               // [rows, n]
        const ptx::TensorMap* const map;  // of out, box 16 x 64, 128-byte swizzle

        __device__ __forceinline__ void prefetch() const { ptx::prefetch_tensor_map(map); }
    };
    struct Shared {
        u8 staging[kConsumerWarps][kBoxes * 16 * 128];

        __device__ __forceinline__ void init_barriers() {}
    };

    __device__ __forceinline__ Epilogue(Shared& shared, const Output& output, const Problem& problem)
        : shared_(shared), output_(output), problem_(problem) {}

    // Stages boxes of 16 rows x 64 columns in shared memory, swizzled as in the output's tensor map, so that the copy
    // of a box overlaps the next tile's multiplications. If the tile ends within the 16 rows, the rest belong to the
    // next group; then threads store the tile's rows themselves.
    __device__ __forceinline__ void store(const float (&sum)[kBlockN / 2], const Tile& tile) {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
        const int row = problem_.first_row(tile) + first, rows = tile.rows - first;
        const u32 staging = ptx::shared_address(shared_.staging) + first / 16 * (kBoxes * kBoxBytes);
        ptx::commit_and_wait_bulk_stores_read();  // of the previous tile, which was staged in the same place
        __syncwarp();
        const u32 to = staging + lane % 16 * 128;
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += 8) {
            const u32 chunk = i / 4 % 8 + lane / 16;  // 16-byte chunk in the row of a box
            ptx::stmatrix(to + i / 32 * kBoxBytes + (chunk ^ lane % 8) * 16, ptx::pack_bf16(sum[i], sum[i + 1]),
                          ptx::pack_bf16(sum[i + 2], sum[i + 3]), ptx::pack_bf16(sum[i + 4], sum[i + 5]),
                          ptx::pack_bf16(sum[i + 6], sum[i + 7]));
        }
        if (rows >= 16) {
            ptx::fence_proxy_async();
            __syncwarp();
            if (ptx::elect_one()) {
#pragma unroll
                for (int box = 0; box < kBlockN / 64; ++box)
                    ptx::tma_store(output_.map, staging + box * kBoxBytes, tile.column + box * 64, row);
            }
            if constexpr (kBlockN % 64 > 0) store_columns<kBlockN / 64 * 64>(tile, staging, row, 16);
        } else if (rows > 0) {
            __syncwarp();
            store_columns<0>(tile, staging, row, rows);
        }
    }

    // Its stores read the CTA's shared memory.
    __device__ __forceinline__ void finish() { ptx::commit_and_wait_bulk_stores_read(); }

  private:
    // The staged rows from column kFirst on, stored by the warp's threads.
    template <int kFirst>
    __device__ __forceinline__ void store_columns(const Tile& tile, u32 staging, int row, int rows) const {
        constexpr int kChunks = (kBlockN - kFirst) / 8;
        u16* const out = output_.out + static_cast<i64>(row) * problem_.n + tile.column;
        for (int i = threadIdx.x % 32; i < rows * kChunks; i += 32) {
            const int r = i / kChunks, chunk = kFirst / 8 + i % kChunks;
            if (tile.column + chunk * 8 < problem_.n) {
                *reinterpret_cast<uint4*>(out + static_cast<i64>(r) * problem_.n + chunk * 8) =
                    ptx::load_shared(staging + chunk / 8 * kBoxBytes + r * 128 + (chunk % 8 ^ r % 8) * 16);
            }
        }
    }

    Shared& shared_;
    const Output output_;
    const Problem problem_;
};

// ---------------------------------------------------------------- swap-AB: 64 columns per warpgroup, 16 rows at a time
template <>
class Epilogue<true, false> {
  public:
    using Element = u16;  // bf16
    struct Output {
        Element* const out;  // [rows, n]

        __device__ __forceinline__ void prefetch() const {}
    };
    struct Shared {
        u8 staging[kConsumerGroups][2][16 * 128];

        __device__ __forceinline__ void init_barriers() {}
    };

    __device__ __forceinline__ Epilogue(Shared& shared, const Output& output, const Problem& problem)
        : shared_(shared), output_(output), problem_(problem) {}

    // Stages rows in a swizzled buffer; only the tile's own rows are stored.
    template <int kSlices>
    __device__ __forceinline__ void store(const float (&sum)[kSlices * 8], const Tile& tile, u32 warpgroup) {
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        const int n = problem_.n, first_column = tile.column + warpgroup * 64, columns = n - first_column;
        const u32 staging = ptx::shared_address(shared_.staging[warpgroup]);
        const int row_in = lane / 16 * 8 + lane % 8, chunk_in = warp * 2 + lane / 8 % 2;
        const int row_out = thread / 8, chunk_out = thread % 8;
        const u32 to = staging + row_in * 128 + ((chunk_in ^ (row_in % 8)) * 16);
        const u32 from = staging + row_out * 128 + ((chunk_out ^ (row_out % 8)) * 16);
        u16* out = output_.out + static_cast<i64>(problem_.first_row(tile)) * n + first_column;
        out += static_cast<i64>(row_out) * n + chunk_out * 8;
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            const float* s = sum + slice * 8;
            const u32 buffer = slice % 2 * (16 * 128);  // the other one was read before the barrier just passed
            ptx::stmatrix_transposed(to + buffer, ptx::pack_bf16(s[0], s[1]), ptx::pack_bf16(s[2], s[3]),
                                     ptx::pack_bf16(s[4], s[5]), ptx::pack_bf16(s[6], s[7]));
            ptx::named_barrier<128>(1 + warpgroup);
            if (slice * 16 + row_out < tile.rows && chunk_out * 8 < columns)
                *reinterpret_cast<uint4*>(out + static_cast<i64>(slice) * 16 * n) = ptx::load_shared(from + buffer);
        }
        ptx::named_barrier<128>(1 + warpgroup);
    }

    __device__ __forceinline__ void finish() {}

  private:
    Shared& shared_;
    const Output output_;
    const Problem problem_;
};

// ---------------------------------------------------------------- SwiGLU: 16 rows per warp, quantized to FP8
#if OTHER_GLU
// How another gated activation differs.
struct GluRule {
    const u16* const bias;   // bf16 [num_groups, 2 n], added to gates and ups; null: none
    const float up_offset;   // added to the clamped ups
    const bool clamp_after;  // clamp the activated gates instead of the gates
};
#endif

template <>
class Epilogue<false, true> {
  public:
    using Element = u8;  // e4m3, from 2 n rows of b: gates, then ups
    struct Output {
        Element* const out;   // [rows, n]
        float* const scales;  // [n / 128, scale_stride], a column for each row of out
        const u32 scale_stride;
        const float alpha, limit;  // of the activation
#if OTHER_GLU
        const GluRule rule;
#endif

        __device__ __forceinline__ void prefetch() const {}
    };
    // Each CTA of a pair has 64 of the 128 columns that share a scale, so the two warps with the same rows exchange the
    // largest magnitude of each row. An exchange must be read before the one after next overwrites it.
    struct Shared {
        u8 staging[kConsumerWarps][16 * 64];
#if OTHER_GLU
        u16 bias[kConsumerWarps][2 * 64];  // of a warp's tile: those of 64 gates, then those of the ups
#endif
        float2 received_amax[2][kConsumerWarps][8];  // rows r and r + 8 of the warp's 16
        u64 received[2][kConsumerWarps];             // barriers

        __device__ __forceinline__ void init_barriers() {
            for (int i = 0; i < 2 * kConsumerWarps; ++i) ptx::mbarrier_init(&received[0][i], 1);
        }
    };

    __device__ __forceinline__ Epilogue(Shared& shared, const Output& output, const Problem& problem)
        : shared_(shared), output_(output), problem_(problem) {}

#if OTHER_GLU
    // Starts to copy the tile's biases, which are there when `store` needs them.
    __device__ __forceinline__ void prepare(const Tile& tile) {
        const int lane = threadIdx.x % 32, half = lane / 8, column = lane % 8 * 8;
        if (output_.rule.bias == nullptr || half >= 2) return;
        const int place = (tile.group * 2 + half) * problem_.n + tile.column + column;
        ptx::copy_async(&shared_.bias[threadIdx.x / 32][half * 64 + column], output_.rule.bias + place);
    }
#endif

    // The first half of sum has the gates, the second half the ups.
    __device__ __forceinline__ void store(float (&sum)[64], const Tile& tile) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
        const int row = problem_.first_row(tile) + warp * 16, rows = tile.rows - warp * 16;
        const u32 staging = ptx::shared_address(shared_.staging) + warp * (16 * 64);
#if OTHER_GLU
        activate(sum, sum + 32, warp, c);
#else
        activate(sum, sum + 32);
#endif
        float low = 0.0f, high = 0.0f;  // largest magnitudes of rows r and r + 8, then their scales
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            float& amax = i % 4 < 2 ? low : high;
            amax = ptx::max_or_nan(amax, fabsf(sum[i]));
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            low = ptx::max_or_nan(low, __shfl_xor_sync(0xffffffff, low, distance));
            high = ptx::max_or_nan(high, __shfl_xor_sync(0xffffffff, high, distance));
        }
        exchange(low, high, warp, r, c);
        low = floats::e4m3_scale(low);
        high = floats::e4m3_scale(high);
        if (c == 0 && problem_.rank == 0) {
            float* const scales =
                output_.scales + static_cast<i64>(tile.column / floats::kScaleBlock) * output_.scale_stride + row + r;
            if (r < rows) scales[0] = low;
            if (r + 8 < rows) scales[8] = high;
        }
        const float by_low = __frcp_rn(low), by_high = __frcp_rn(high);
        const u32 to = staging + r * 64 + c * 2, swizzle = r / 2 % 4;  // the same for rows r and r + 8
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const u32 place = to + ((i / 8 ^ swizzle) * 16) + i / 4 % 2 * 8;
            ptx::store_shared(place, ptx::pack_e4m3(sum[i] * by_low, sum[i + 1] * by_low));
            ptx::store_shared(place + 8 * 64, ptx::pack_e4m3(sum[i + 2] * by_high, sum[i + 3] * by_high));
        }
        __syncwarp();
        u8* const out = output_.out + static_cast<i64>(row) * problem_.n + tile.column;
#pragma unroll
        for (int i = lane; i < 64; i += 32) {
            const int of = i / 4, chunk = i % 4;
            if (of < rows)
                *reinterpret_cast<uint4*>(out + static_cast<i64>(of) * problem_.n + chunk * 16) =
                    ptx::load_shared(staging + of * 64 + (chunk ^ of / 2 % 4) * 16);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void finish() {}

  private:
#if OTHER_GLU
    // As below, with biases and the rule's variations.
    __device__ __forceinline__ void activate(float* gate, float* up, int warp, int c) const {
        const GluRule& rule = output_.rule;
        if (rule.bias != nullptr) {
            ptx::wait_for_async_copies();
            __syncwarp();
            const u32* const bias = reinterpret_cast<const u32*>(shared_.bias[warp]) + c;
#pragma unroll
            for (int i = 0; i < 32; i += 4) {  // columns i / 4 * 8 + c * 2 and the next, of rows r and r + 8
                add_bias(gate + i, bias[i]);
                add_bias(up + i, bias[32 + i]);
            }
        }
        const float limit = output_.limit, to_exponent = -1.44269504f * output_.alpha;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float x = rule.clamp_after ? gate[i] : ptx::min_or_nan(gate[i], limit);
            const float activated = x * ptx::approximate_reciprocal(1.0f + ptx::approximate_exp2(x * to_exponent));
            const float factor = ptx::max_or_nan(ptx::min_or_nan(up[i], limit), -limit) + rule.up_offset;
            gate[i] = (rule.clamp_after ? ptx::min_or_nan(activated, limit) : activated) * factor;
        }
    }

    __device__ __forceinline__ static void add_bias(float* four, u32 two) {
        const float even = ptx::to_float<true>(two), odd = ptx::to_float<true>(two >> 16);
        four[0] += even;
        four[1] += odd;
        four[2] += even;
        four[3] += odd;
    }
#else
    // gate = gate * sigmoid(alpha * gate) * up, gates clamped to at most limit and ups to +-limit; for most families
    // alpha is 1 and limit infinite.
    __device__ __forceinline__ void activate(float* gate, float* up) const {
        constexpr float kLargestFloat = 3.40282347e38f;
        if (output_.limit < kLargestFloat) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                gate[i] = ptx::min_or_nan(gate[i], output_.limit);
                up[i] = ptx::max_or_nan(ptx::min_or_nan(up[i], output_.limit), -output_.limit);
            }
        }
        const float to_exponent = -1.44269504f * output_.alpha;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            gate[i] =
                gate[i] * ptx::approximate_reciprocal(1.0f + ptx::approximate_exp2(gate[i] * to_exponent)) * up[i];
    }
#endif

    // Takes the maximum over both CTAs.
    __device__ __forceinline__ void exchange(float& low, float& high, int warp, int r, int c) {
        u64* const received = &shared_.received[exchanges_ % 2][warp];
        float2* const amax = &shared_.received_amax[exchanges_ % 2][warp][r];
        if (c == 0) ptx::store_to_cta(amax, float2{low, high}, received, problem_.rank ^ 1);
        if (ptx::elect_one()) ptx::mbarrier_arrive_expect_bytes(received, 8 * sizeof(float2));
        __syncwarp();
        ptx::mbarrier_wait(received, exchanges_ / 2 % 2);
        ++exchanges_;
        low = ptx::max_or_nan(low, amax->x);
        high = ptx::max_or_nan(high, amax->y);
    }

    Shared& shared_;
    const Output output_;
    const Problem problem_;
    u32 exchanges_ = 0;  // tiles so far
};
