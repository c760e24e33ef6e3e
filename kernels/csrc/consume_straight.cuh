// Consumers for tall groups: 64 tokens a warpgroup are wgmma's M and 128 rows of weights its N. A thread needs two
// scales a K block, so promotion costs the shared memory next to nothing.
#pragma once

#include "storage.cuh"
#include "wgmma.cuh"

namespace straight {

constexpr int kAccumulators = kBlockN / 2;

// Writes a warp's 16 rows of a tile, 32 columns at a time through a swizzled buffer of its own.
__device__ __forceinline__ void store(const float (&sum)[kAccumulators], u32 staging, u16* out, int rows, int columns,
                                      int n) {
    const int lane = threadIdx.x % 32;
    const int row_in = lane % 16, row_out = lane / 4, chunk_out = lane % 4;
    // Rows are 64 bytes: two of them share the 32 banks, so the chunk is swizzled by the pair.
    const u32 in = staging + row_in * 64, swizzle_in = row_in / 2 % 4;
    const u32 from = staging + row_out * 64 + ((chunk_out ^ (row_out / 2 % 4)) * 16);
    out += static_cast<i64>(row_out) * n + chunk_out * 8;
#pragma unroll
    for (int part = 0; part < kBlockN / 32; ++part) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const float* s = sum + part * 16 + pair * 8;
            const u32 chunk = pair * 2 + lane / 16;
            ptx::stmatrix(in + ((chunk ^ swizzle_in) * 16), ptx::pack_bf16(s[0], s[1]), ptx::pack_bf16(s[2], s[3]),
                          ptx::pack_bf16(s[4], s[5]), ptx::pack_bf16(s[6], s[7]));
        }
        __syncwarp();
        const uint4 low = ptx::load_shared(from), high = ptx::load_shared(from + 8 * 64);
        if (part * 32 + chunk_out * 8 < columns) {
            if (row_out < rows) *reinterpret_cast<uint4*>(out + part * 32) = low;
            if (row_out + 8 < rows) *reinterpret_cast<uint4*>(out + part * 32 + static_cast<i64>(8) * n) = high;
        }
        __syncwarp();
    }
}

// A warpgroup's way through all tiles. It issues the first K block of a tile before it stores the tile before, so that
// the tensor cores have work during the epilogue; with two banks of accumulators also during every promotion.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(SharedStorage& shared, u32 warpgroup)
        : shared_(shared),
          tokens_(wgmma::Descriptor::of(shared.tokens[0] + warpgroup * 64 * kBlockK)),
          weights_(wgmma::Descriptor::of(shared.weights[0])),
          row_(threadIdx.x / 32 * 16),
          first_row_(warpgroup * 64) {}

    __device__ __forceinline__ void run(u16* out, int n, int k_blocks) {
        float sum[kAccumulators], acc[kBanks][kAccumulators];
        bool unsaved = false;
        for (int slot = 0, before = 0;; before = slot, slot = slot == kStages ? 0 : slot + 1) {
            ptx::mbarrier_wait(&shared_.full[issued_.stage], issued_.phase);
            const int rows = shared_.tiles[slot].rows;
            if (rows <= first_row_) {
                if (unsaved) save(sum, shared_.tiles[before], out, n);
                if (rows == 0) break;
                pass(k_blocks);
                unsaved = false;
                continue;
            }
            issue(acc[0]);
            if (unsaved) save(sum, shared_.tiles[before], out, n);
            unsaved = true;
#pragma unroll
            for (int i = 0; i < kAccumulators; ++i) sum[i] = 0.f;
            if constexpr (kBanks == 1) {
#pragma unroll 1
                for (int kb = 1; kb < k_blocks; ++kb) {
                    retire<0>(acc[0], sum);
                    issue(acc[0]);
                }
                retire<0>(acc[0], sum);
            } else {
#pragma unroll 1
                for (int kb = 2; kb < k_blocks; kb += 2) {
                    issue(acc[1]);
                    retire<1>(acc[0], sum);
                    issue(acc[0]);
                    retire<1>(acc[1], sum);
                }
                if (k_blocks % 2 == 0) {
                    issue(acc[1]);
                    retire<1>(acc[0], sum);
                    retire<0>(acc[1], sum);
                } else {
                    retire<0>(acc[0], sum);
                }
            }
        }
    }

  private:
    // Starts the next K block's multiplication.
    __device__ __forceinline__ void issue(float (&acc)[kAccumulators]) {
        ptx::mbarrier_wait(&shared_.full[issued_.stage], issued_.phase);
        wgmma::multiply_block<kBlockN>(acc, tokens_ + issued_.stage * kBlockM * kBlockK,
                                       weights_ + issued_.stage * kBlockN * kBlockK);
        issued_.advance();
    }

    // Finishes the oldest one, lets its stage go and promotes it: the tensor cores keep about 14 bits, so every 128 of
    // K is added up in fp32.
    template <int kPending>
    __device__ __forceinline__ void retire(float (&acc)[kAccumulators], float (&sum)[kAccumulators]) {
        const float* scales = shared_.scales[retired_] + row_ + threadIdx.x % 32 / 4;
        const float low = scales[0], high = scales[8];
        wgmma::wait<kPending>(acc);
        release(retired_);
        if (++retired_ == kStages) retired_ = 0;
#pragma unroll
        for (int i = 0; i < kAccumulators; i += 4) {
            sum[i + 0] += acc[i + 0] * low;
            sum[i + 1] += acc[i + 1] * low;
            sum[i + 2] += acc[i + 2] * high;
            sum[i + 3] += acc[i + 3] * high;
        }
    }

    // A tile too low for this warpgroup: nothing to do but to let its stages go.
    __device__ __forceinline__ void pass(int k_blocks) {
        for (int kb = 0; kb < k_blocks; ++kb, issued_.advance()) {
            ptx::mbarrier_wait(&shared_.full[issued_.stage], issued_.phase);
            release(issued_.stage);
        }
        retired_ = issued_.stage;
    }

    __device__ __forceinline__ void release(int stage) {
        const u32 lane = threadIdx.x % 32;
        if (lane < kCluster) ptx::mbarrier_arrive_at<kCluster>(&shared_.empty[stage], lane);
    }

    __device__ __forceinline__ void save(const float (&sum)[kAccumulators], const TileRecord& tile, u16* out, int n) {
        store(sum, ptx::shared_address(shared_.staging) + row_ * 64, out + tile.offset + static_cast<i64>(row_) * n,
              tile.rows - row_, tile.columns, n);
    }

    SharedStorage& shared_;
    const wgmma::Descriptor tokens_, weights_;
    const int row_, first_row_;  // of the warp and of the warpgroup in the tile
    Pipeline issued_;
    int retired_ = 0;
};

}  // namespace straight
