// wgmma with e4m3 operands in shared memory and fp32 accumulators: whole K blocks, one or two in flight.
#pragma once

#include "wgmma_instructions.cuh"

namespace wgmma {

// d = A[64 x 128] * B[N x 128]^T: a K block of the ring's stage, committed as one group.
template <int kN>
__device__ __forceinline__ void multiply_block(float (&d)[kN / 2], Descriptor a, Descriptor b) {
    ptx::wgmma_fence();
    Multiply<kN>::restart(d, a, b);
    Multiply<kN>::add(d, a + 32, b + 32);
    Multiply<kN>::add(d, a + 64, b + 64);
    Multiply<kN>::add(d, a + 96, b + 96);
    ptx::wgmma_commit();
}

// Waits for all multiplications but the newest `kPending` blocks, and only then lets the compiler read d.
template <int kPending = 0, int kRegisters>
__device__ __forceinline__ void wait(float (&d)[kRegisters]) {
    ptx::wgmma_wait<kPending>();
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Runs a tile's K blocks with two of them in flight: one is multiplied while the other is promoted. `multiply` starts
// the next block and `promote` takes an older one's product, both in order. Between the start of a product and its end
// no branch may diverge: ptxas would wait after every instruction.
template <typename Accumulators, typename Start, typename Promote>
__device__ __forceinline__ void in_pairs(Accumulators (&acc)[2], int k_blocks, Start multiply, Promote promote) {
    multiply(acc[0]);
    int left = k_blocks - 1;
#pragma unroll 1
    for (; left >= 2; left -= 2) {
        multiply(acc[1]);
        wait<1>(acc[0]);
        promote(acc[0]);
        multiply(acc[0]);
        wait<1>(acc[1]);
        promote(acc[1]);
    }
    if (left == 1) {
        multiply(acc[1]);
        wait<1>(acc[0]);
        promote(acc[0]);
        wait(acc[1]);
        promote(acc[1]);
    } else {
        wait(acc[0]);
        promote(acc[0]);
    }
}

}  // namespace wgmma
