// wgmma with A in registers, for weights that a consumer decodes.
#pragma once

#include "wgmma.cuh"

namespace wgmma {

// A product with A in registers, which the tensor cores read until it is complete.
template <int kRegisters>
struct Product {
    float d[kRegisters];
    u32 a[16];  // of columns 32 i to 32 i + 31: 4 i to 4 i + 3
};

// multiply_block of wgmma.cuh with such an A; and half of it, 64 columns of a K block: the first ones restart d, the
// others are added.
template <int kN>
__device__ __forceinline__ void multiply_block(float (&d)[kN / 2], const u32 (&a)[16], Descriptor b) {
    ptx::wgmma_fence();
    Multiply<kN>::restart(d, a, b);
    Multiply<kN>::add(d, a + 4, b + 32);
    Multiply<kN>::add(d, a + 8, b + 64);
    Multiply<kN>::add(d, a + 12, b + 96);
    ptx::wgmma_commit();
}
template <int kN, bool kFirst>
__device__ __forceinline__ void multiply_half(float (&d)[kN / 2], const u32 (&a)[8], Descriptor b) {
    ptx::wgmma_fence();
    if constexpr (kFirst)
        Multiply<kN>::restart(d, a, b);
    else
        Multiply<kN>::add(d, a, b);
    Multiply<kN>::add(d, a + 4, b + 32);
    ptx::wgmma_commit();
}

// Keeps the compiler from reusing the registers of fragments, or reading sums, before this point: call it after the
// wait.
template <int kRegisters>
__device__ __forceinline__ void keep(u32 (&a)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+r"(a[i]));
}
template <int kRegisters>
__device__ __forceinline__ void keep(float (&sum)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(sum[i]));
}

// Waits as in wgmma.cuh.
template <int kPending = 0, int kRegisters>
__device__ __forceinline__ void wait_for_fragments(u32 (&a)[kRegisters]) {
    ptx::wgmma_wait<kPending>();
    keep(a);
}
template <int kPending = 0, int kRegisters>
__device__ __forceinline__ void wait(Product<kRegisters>& product) {
    wait<kPending>(product.d);
    keep(product.a);
}
// Of several products, each with its accumulators.
template <int kPending, int kCount, int kRegisters>
__device__ __forceinline__ void wait(float (&d)[kCount][kRegisters]) {
    ptx::wgmma_wait<kPending>();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
        for (int j = 0; j < kRegisters; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
}

}  // namespace wgmma
