// wgmma m64nNk32 with e4m3 operands in shared memory and fp32 accumulators, for every N the kernels use.
// Source: PTX ISA 8.x, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "ptx.cuh"

namespace wgmma {

// Shared-memory matrix descriptor, K-major with 128-byte swizzle: 8-row atoms of 1024 bytes lie one after another.
__device__ __forceinline__ u64 descriptor(const void* tile) {
    constexpr u64 kStrideBetweenAtoms = 1024 >> 4;
    constexpr u64 kSwizzle128B = 1;
    return (static_cast<u64>(ptx::shared_address(tile) & 0x3ffff) >> 4) | (1ull << 16) | (kStrideBetweenAtoms << 32) |
           (kSwizzle128B << 62);
}

// Multiply<N>: d[64 x N] = A[64 x 32] * B[N x 32]^T (start) or += (add); N / 2 registers a thread.
template <int kN>
struct Multiply;

// Operands by blocks of eight registers: R(i, C) names eight accumulators, Si their positions in the instruction.
#define R(i, C)                                                                                               \
    C(d[8 * i]), C(d[8 * i + 1]), C(d[8 * i + 2]), C(d[8 * i + 3]), C(d[8 * i + 4]), C(d[8 * i + 5]), C(d[8 * i + 6]), \
        C(d[8 * i + 7])
#define WRITE(x) "=f"(x)
#define UPDATE(x) "+f"(x)
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

#define INSTRUCTION(N, S, A, B, ACCUMULATE)                                                            \
    "{ .reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0;\n"                                              \
    "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" S "}, " A ", " B ", p, 1, 1; }"

// `start` only writes its accumulators, so that none is alive between two K blocks: with tiles of many heights in one
// kernel the compiler could not give them the same registers in each.
#define WGMMA(N, S, R, A, B)                                                                            \
    template <>                                                                                         \
    struct Multiply<N> {                                                                                \
        static __device__ __forceinline__ void start(float* d, u64 a, u64 b) {                          \
            asm volatile(INSTRUCTION(N, S, A, B, "0") : R(WRITE) : "l"(a), "l"(b));                      \
        }                                                                                               \
        static __device__ __forceinline__ void add(float* d, u64 a, u64 b) {                            \
            asm volatile(INSTRUCTION(N, S, A, B, "1") : R(UPDATE) : "l"(a), "l"(b));                     \
        }                                                                                               \
    };

WGMMA(16, S0, R0, "%8", "%9")
WGMMA(32, S1, R1, "%16", "%17")
WGMMA(48, S2, R2, "%24", "%25")
WGMMA(64, S3, R3, "%32", "%33")
WGMMA(80, S4, R4, "%40", "%41")
WGMMA(96, S5, R5, "%48", "%49")
WGMMA(112, S6, R6, "%56", "%57")
WGMMA(128, S7, R7, "%64", "%65")
WGMMA(144, S8, R8, "%72", "%73")
WGMMA(160, S9, R9, "%80", "%81")
WGMMA(176, S10, R10, "%88", "%89")
WGMMA(192, S11, R11, "%96", "%97")

#undef INSTRUCTION
#undef WRITE
#undef UPDATE
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
