// The instructions behind wgmma.cuh: macros that name up to 96 registers, for every N the kernels use.
// Source: PTX ISA 8.x, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "ptx.cuh"

namespace wgmma {

// Shared-memory matrix descriptor, K-major with 128-byte swizzle: 8-row atoms of 1024 bytes lie one after another.
// Only the low word depends on the address, so that moving along K or to another stage is one 32-bit addition.
struct Descriptor {
    u32 low;

    static __device__ __forceinline__ Descriptor of(const void* tile) {
        // Through a shuffle the compiler keeps the result in a uniform register instead of computing it again.
        return {__shfl_sync(0xffffffff, ((ptx::shared_address(tile) & 0x3ffff) >> 4) | (1u << 16), 0)};
    }
    __device__ __forceinline__ Descriptor operator+(u32 bytes) const { return {low + (bytes >> 4)}; }
    __device__ __forceinline__ u64 bits() const {
        constexpr u32 kStrideBetweenAtoms = 1024 >> 4, kSwizzle128B = 1u << 30;
        u64 bits;
        asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "r"(low), "n"(kStrideBetweenAtoms | kSwizzle128B));
        return bits;
    }
};

// Multiply<N>: d[64 x N] = A[64 x 32] * B[N x 32]^T (restart) or += (add); N / 2 registers per thread. A is in shared
// memory or, four registers, a fragment of it. In bf16, the same 32 bytes of a row are 16 elements.
template <int kN, bool kBf16 = false>
struct Multiply;

// Operands by blocks of eight registers: R(i, C) names eight accumulators, Si their positions in the instruction.
#define R(i, C)                                                                                                        \
    C(d[8 * i]), C(d[8 * i + 1]), C(d[8 * i + 2]), C(d[8 * i + 3]), C(d[8 * i + 4]), C(d[8 * i + 5]), C(d[8 * i + 6]), \
        C(d[8 * i + 7])
#define UPDATE(x) "+f"(x)
#define FRAGMENT(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
#define S0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define S1 S0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define S2 S1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define S3 S2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define S4 S3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define S5 S4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define S6 S5 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define S7 S6 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define S8 S7 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define S9 S8 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define S10 S9 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define S11 S10 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define R0(C) R(0, C)
#define R1(C) R0(C), R(1, C)
#define R2(C) R1(C), R(2, C)
#define R3(C) R2(C), R(3, C)
#define R4(C) R3(C), R(4, C)
#define R5(C) R4(C), R(5, C)
#define R6(C) R5(C), R(6, C)
#define R7(C) R6(C), R(7, C)
#define R8(C) R7(C), R(8, C)
#define R9(C) R8(C), R(9, C)
#define R10(C) R9(C), R(10, C)
#define R11(C) R10(C), R(11, C)

#define INSTRUCTION(N, TYPES, S, A, B, ACCUMULATE, MORE)                                                          \
    "{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" S "}, " A \
    ", " B ", p, 1, 1" MORE "; }"
#define FP8(N, S, A, B, ACCUMULATE) INSTRUCTION(N, "k32.f32.e4m3.e4m3", S, A, B, ACCUMULATE, "")
#define BF16(N, S, A, B, ACCUMULATE) INSTRUCTION(N, "k16.f32.bf16.bf16", S, A, B, ACCUMULATE, ", 0, 0")

// `restart` does not read its accumulators, but names them as if it did: they stay in the same registers, which an
// unrolled loop needs. Otherwise the compiler would keep the accumulators of two K blocks there.
#define WGMMA(N, S, R, A, B, A4, B4)                                                           \
    template <>                                                                                \
    struct Multiply<N> {                                                                       \
        static __device__ __forceinline__ void restart(float* d, Descriptor a, Descriptor b) { \
            asm volatile(FP8(N, S, A, B, "0") : R(UPDATE) : "l"(a.bits()), "l"(b.bits()));     \
        }                                                                                      \
        static __device__ __forceinline__ void add(float* d, Descriptor a, Descriptor b) {     \
            asm volatile(FP8(N, S, A, B, "1") : R(UPDATE) : "l"(a.bits()), "l"(b.bits()));     \
        }                                                                                      \
        static __device__ __forceinline__ void restart(float* d, const u32* a, Descriptor b) { \
            asm volatile(FP8(N, S, A4, B4, "0") : R(UPDATE) : FRAGMENT(a), "l"(b.bits()));     \
        }                                                                                      \
        static __device__ __forceinline__ void add(float* d, const u32* a, Descriptor b) {     \
            asm volatile(FP8(N, S, A4, B4, "1") : R(UPDATE) : FRAGMENT(a), "l"(b.bits()));     \
        }                                                                                      \
    };

WGMMA(16, S0, R0, "%8", "%9", "{%8,%9,%10,%11}", "%12")
WGMMA(32, S1, R1, "%16", "%17", "{%16,%17,%18,%19}", "%20")
WGMMA(48, S2, R2, "%24", "%25", "{%24,%25,%26,%27}", "%28")
WGMMA(64, S3, R3, "%32", "%33", "{%32,%33,%34,%35}", "%36")
WGMMA(96, S5, R5, "%48", "%49", "{%48,%49,%50,%51}", "%52")
WGMMA(128, S7, R7, "%64", "%65", "{%64,%65,%66,%67}", "%68")
WGMMA(192, S11, R11, "%96", "%97", "{%96,%97,%98,%99}", "%100")

template <>
struct Multiply<128, true> {
    static __device__ __forceinline__ void add(float* d, Descriptor a, Descriptor b) {
        asm volatile(BF16(128, S7, "%64", "%65", "1") : R7(UPDATE) : "l"(a.bits()), "l"(b.bits()));
    }
};

#undef INSTRUCTION
#undef FP8
#undef BF16
#undef UPDATE
#undef FRAGMENT
#undef WGMMA
#undef R
#undef S0
#undef S1
#undef S2
#undef S3
#undef S4
#undef S5
#undef S6
#undef S7
#undef S8
#undef S9
#undef S10
#undef S11
#undef R0
#undef R1
#undef R2
#undef R3
#undef R4
#undef R5
#undef R6
#undef R7
#undef R8
#undef R9
#undef R10
#undef R11

}  // namespace wgmma
