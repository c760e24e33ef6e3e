// MXFP4 weights in registers: codes of four bits (e2m1) and exponents become the fragments of wgmma's A, in e4m3.
//
// kernels/backends/hopper/packed_weights.py packs a K block of 128 rows for 8 warps, 16 rows each: first the codes, for
// each warp and lane two times 16 bytes, then the exponents. A lane has rows g and g + 8 of the warp's (g = lane / 4).
// One word has eight codes of a row, half a fragment, with magnitudes and signs where they are needed:
//
//   bits 4i to 4i + 2    magnitude i: columns 4 (lane % 4) to + 3, then the same 16 further on
//   bits 7, 15, 23, 31   signs of the first four
//   bits 3, 11, 19, 27   signs of the last four
//
// Scales of MXFP4 are powers of two: what a group of 32 columns has above the least of its block, times 8, is added to
// the exponents of e4m3.
#pragma once

#include "parameters.cuh"

namespace codes {

constexpr int kWarpCodes = 2 * 32 * 16;    // bytes of a warp's codes
constexpr int kWarpExponents = 8 * 2 * 4;  // bytes: rows g and g + 8, four groups of 32 columns
constexpr u32 kSigns = 0x80808080;

// Starts to load a K block of the tile's rows of b; a CTA without columns loads the last ones.
__device__ __forceinline__ void load(u64* full, u8* to, const u8* b_codes, const Problem& problem, const Tile& tile,
                                     int kb) {
    const int blocks_n = (problem.n + kOutBlockN - 1) / kOutBlockN;
    const i64 block = tile.group * static_cast<i64>(blocks_n) + min(tile.column / kOutBlockN, blocks_n - 1);
    ptx::bulk_load(full, to, b_codes + (block * problem.k_blocks + kb) * kBytesOfB, kBytesOfB);
}

// Eight codes of a row: the half of a fragment in columns 0 to 15, and that in columns 16 to 31.
struct Halves {
    u32 first, last;
};
__device__ __forceinline__ Halves decode(u32 word, u32 exponent) {
    // 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^-5 in e4m3; 0 has no exponent.
    const u32 low = exponent * 0x01010100 + 0x14100800, high = exponent * 0x01010101 + 0x24201c18;
    const u32 magnitudes = word & 0x77777777;
    return {ptx::permute_bytes(low, high, magnitudes) | (word & kSigns),
            ptx::permute_bytes(low, high, magnitudes >> 16) | (word << 4 & kSigns)};
}

// This thread's fragments of half a K block, 64 columns; `warp`: of all consumers.
template <int kHalf>
__device__ __forceinline__ void decode(u32* a, const u8* block, int warp, int lane) {
    const uint4 four = reinterpret_cast<const uint4*>(block + warp * kWarpCodes)[kHalf * 32 + lane];
    const u32 words[4] = {four.x, four.y, four.z, four.w};
    const u8* const exponents = block + 8 * kWarpCodes + warp * kWarpExponents;
    const uint2 of_rows = reinterpret_cast<const uint2*>(exponents)[lane / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows g and g + 8 of 32 columns, then of the next 32
        const int columns = i / 2, high = i % 2;
        const u32 exponent = ptx::permute_bytes(high ? of_rows.y : of_rows.x, 0, 0x4440 | kHalf * 2 + columns);
        const Halves halves = decode(words[i], exponent);
        a[columns * 4 + high] = halves.first;
        a[columns * 4 + 2 + high] = halves.last;
    }
}

}  // namespace codes
