// Stores rows of bf16 from swapped operands: 64 columns per warpgroup, 16 rows at a time.
#pragma once

#include "parameters.cuh"

class SwapAbEpilogue {
  public:
    struct Output {
        u16* out;  // bf16 [rows, n]
    };
    struct Shared {
        u8 staging[kConsumerGroups][2][16 * 128];

        __device__ __forceinline__ void init_barriers() {}
    };

    __device__ __forceinline__ SwapAbEpilogue(Shared& shared, const ptx::TensorMap&, const Output& output,
                                              const Problem& problem)
        : shared_(shared), output_(output), problem_(problem) {}

    __device__ __forceinline__ void prepare(const Tile&) {}

    // Stages rows in a swizzled buffer; only the tile's own rows are stored.
    template <int kSlices>
    __device__ __forceinline__ void store(const float (&sum)[kSlices * 8], const Tile& tile, u32 warpgroup) {
        const u32 index = kFourBits ? ptx::thread_index() : threadIdx.x;
        const int thread = index % 128, warp = thread / 32, lane = thread % 32;
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
