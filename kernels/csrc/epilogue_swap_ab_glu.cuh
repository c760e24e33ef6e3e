// Activates gates and ups from swapped operands, and stores the result in FP8 with its scales: a warp has 8 columns of
// all rows. Of its 16 rows of b the first 8 are gates, the others the matching ups.
#pragma once

#include "activation_other_glu.cuh"
#include "activation_swiglu.cuh"
#include "epilogue_glu.cuh"
#include "parameters.cuh"

template <typename Activation>
class SwapAbGluEpilogue {
  public:
    using Output = typename GluEpilogue<Activation>::Output;
    // Each CTA of a pair has 64 of the 128 columns that share a scale. What a tile leaves is read before the one after
    // next overwrites it.
    struct Shared {
        u8 staging[kBlockM * 64];
        u32 amax[2][kBlockM];  // of this CTA's columns: bits, in the order of magnitudes, of which NaN is the largest
        u32 received_amax[2][kBlockM];  // of the other CTA's
        u64 received[2];                // barriers

        __device__ __forceinline__ void init_barriers() {
            for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&received[i], 1);
            for (int i = 0; i < kBlockM; i += 4) *reinterpret_cast<uint4*>(&amax[0][i]) = {};
        }
    };

    __device__ __forceinline__ SwapAbGluEpilogue(Shared& shared, const ptx::TensorMap&, const Output& output,
                                                 const Problem& problem)
        : shared_(shared), output_(output), problem_(problem) {}

    __device__ __forceinline__ void prepare(const Tile& tile) {
        const int column = threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
        biases_ = Activation::biases(output_.activation, problem_, tile, column);
    }

    // Of a thread's numbers two are gates, of rows 2 c and 2 c + 1 of eight, and two the matching ups.
    template <int kSlices>
    __device__ __forceinline__ void store(const float (&sum)[kSlices * 8], const Tile& tile, u32) {
        constexpr int kCount = kSlices * 4;  // of activated numbers
        const int thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32, g = lane / 4, c = lane % 4;
        float gate[kCount], up[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            gate[i] = sum[i * 2], gate[i + 1] = sum[i * 2 + 1];
            up[i] = sum[i * 2 + 2], up[i + 1] = sum[i * 2 + 3];
        }
        Activation::template apply<kCount>(output_.activation, biases_, gate, up);

        // -- scales, from the largest magnitudes of all warps' columns, and of the other CTA's
        u32* const amax = shared_.amax[tiles_ % 2];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float largest = fabsf(gate[i]);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                largest = ptx::max_or_nan(largest, __shfl_xor_sync(0xffffffff, largest, distance));
            if (g == i % 8) atomicMax(amax + i / 2 * 8 + c * 2 + i % 2, __float_as_uint(largest));
        }
        wait_for_all();
        const u32* const others = exchange(amax, kSlices * 16, thread);
        if (thread < kBlockM) shared_.amax[(tiles_ + 1) % 2][thread] = 0;
        ++tiles_;
        const auto scale_of = [&](int row) {
            return floats::e4m3_scale(ptx::max_or_nan(__uint_as_float(amax[row]), __uint_as_float(others[row])));
        };
        const int first = problem_.first_row(tile);
        if (thread < tile.rows && problem_.rank == 0)
            output_
                .scales[static_cast<i64>(tile.column / floats::kScaleBlock) * output_.scale_stride + first + thread] =
                scale_of(thread);

        // -- quantize into staging memory: lanes with neighboring columns have a row each of the two
        const u32 staging = ptx::shared_address(shared_.staging);
        const bool odd = g % 2;
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            const int row = i / 2 * 8 + c * 2;
            const float even_row = gate[i] * __frcp_rn(scale_of(row));
            const float odd_row = gate[i + 1] * __frcp_rn(scale_of(row + 1));
            const float got = __shfl_xor_sync(0xffffffff, odd ? even_row : odd_row, 4);
            const u16 two = odd ? ptx::pack_e4m3(got, odd_row) : ptx::pack_e4m3(even_row, got);
            const int to = row + odd;
            ptx::store_shared(staging + to * 64 + (warp / 2 ^ to / 2 % 4) * 16 + warp % 2 * 8 + (g & ~1), two);
        }
        wait_for_all();

        // -- copy the tile's own rows
        u8* const out = output_.out + static_cast<i64>(first) * problem_.n + tile.column;
#pragma unroll
        for (int i = thread; i < kSlices * 16 * 4; i += kConsumerWarps * 32) {
            const int row = i / 4, chunk = i % 4;
            if (row < tile.rows)
                *reinterpret_cast<uint4*>(out + static_cast<i64>(row) * problem_.n + chunk * 16) =
                    ptx::load_shared(staging + row * 64 + (chunk ^ row / 2 % 4) * 16);
        }
    }

    __device__ __forceinline__ void finish() {}

  private:
    static __device__ __forceinline__ void wait_for_all() { ptx::named_barrier<kConsumerWarps * 32>(1); }

    // The other CTA's amax, for which it gets ours.
    __device__ __forceinline__ const u32* exchange(const u32* amax, int rows, int thread) {
        u64* const received = &shared_.received[tiles_ % 2];
        u32* const others = shared_.received_amax[tiles_ % 2];
        if (thread * 2 < rows) {
            const int i = thread * 2;
            const float2 two = {__uint_as_float(amax[i]), __uint_as_float(amax[i + 1])};
            ptx::store_to_cta(reinterpret_cast<float2*>(others + i), two, received, problem_.rank ^ 1);
        }
        if (thread == 0) ptx::mbarrier_arrive_expect_bytes(received, rows * sizeof(u32));
        ptx::mbarrier_wait(received, tiles_ / 2 % 2);
        return others;
    }

    Shared& shared_;
    const Output output_;
    const Problem problem_;
    u32 tiles_ = 0;  // so far
    typename Activation::Biases biases_;
};
