// Activates gates and ups, and stores the result in FP8 with its scales: 16 rows per warp.
//
// An Activation (activation_swiglu.cuh, activation_other_glu.cuh) has these parts:
//
//   Arguments                          what a launch passes for it
//   Shared                             the staging memory of each warp, and the activation's own
//   prepare(shared, arguments, ...)    begins what `activate` needs, a tile earlier
//   activate(shared, arguments, ...)   gate = the activated gate times its up
#pragma once

#include "activation_other_glu.cuh"
#include "activation_swiglu.cuh"
#include "parameters.cuh"

template <typename Activation>
class GluEpilogue {
  public:
    struct Output {
        u8* out;        // e4m3 [rows, n], from 2 n rows of b: gates, then ups
        float* scales;  // [n / 128, scale_stride], a column for each row of out
        u32 scale_stride;
        typename Activation::Arguments activation;
    };
    // Each CTA of a pair has 64 of the 128 columns that share a scale, so the two warps with the same rows exchange the
    // largest magnitude of each row. An exchange must be read before the one after next overwrites it.
    struct Shared : Activation::Shared {
        float2 received_amax[2][kConsumerWarps][8];  // rows r and r + 8 of the warp's 16
        u64 received[2][kConsumerWarps];             // barriers

        __device__ __forceinline__ void init_barriers() {
            for (int i = 0; i < 2 * kConsumerWarps; ++i) ptx::mbarrier_init(&received[0][i], 1);
        }
    };

    __device__ __forceinline__ GluEpilogue(Shared& shared, const ptx::TensorMap&, const Output& output,
                                           const Problem& problem)
        : shared_(shared), output_(output), problem_(problem) {}

    __device__ __forceinline__ void prepare(const Tile& tile) {
        Activation::prepare(shared_, output_.activation, problem_, tile);
    }

    // The first half of sum has the gates, the second half the ups.
    __device__ __forceinline__ void store(float (&sum)[64], const Tile& tile) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
        const int row = problem_.first_row(tile) + warp * 16, rows = tile.rows - warp * 16;
        const u32 staging = ptx::shared_address(shared_.staging) + warp * (16 * 64);
        Activation::activate(shared_, output_.activation, sum, sum + 32, warp, c);

        // -- scales, from the largest magnitudes of rows r and r + 8
        float low = 0.0f, high = 0.0f;
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

        // -- quantize into staging memory
        const float by_low = __frcp_rn(low), by_high = __frcp_rn(high);
        const u32 to = staging + r * 64 + c * 2, swizzle = r / 2 % 4;  // the same for rows r and r + 8
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            const u32 place = to + ((i / 8 ^ swizzle) * 16) + i / 4 % 2 * 8;
            ptx::store_shared(place, ptx::pack_e4m3(sum[i] * by_low, sum[i + 1] * by_low));
            ptx::store_shared(place + 8 * 64, ptx::pack_e4m3(sum[i + 2] * by_high, sum[i + 3] * by_high));
        }
        __syncwarp();

        // -- copy the tile's own rows
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
