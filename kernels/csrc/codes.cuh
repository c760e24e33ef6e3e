// Weights of four bits in registers: codes become the fragments of wgmma's A, in e4m3, which has all of their values.
//
// kernels/backends/hopper/packed_weights.py packs a K block of 128 rows for 8 warps, 16 rows each: first the codes, for
// each warp and lane two times 16 bytes, then the scales. A lane has rows g and g + 8 of the warp's (g = lane / 4). One
// word has eight codes of a row, half a fragment, with their lower three bits and the highest where they are needed:
//
//   bits 4i to 4i + 2    code i: columns 4 (lane % 4) to + 3, then the same 16 further on
//   bits 7, 15, 23, 31   the highest bits, signs, of the first four
//   bits 3, 11, 19, 27   those of the last four
//
// Scales of MXFP4 are powers of two: what a group of 32 columns has above 2^-11 of the largest of its block, times 8,
// is added to the exponents of e4m3. Those of INT4 (fp16) and NVFP4 (e4m3) multiply products of their columns alone.
#pragma once

#include "parameters.cuh"

namespace codes {

constexpr int kWarpCodes = 2 * 32 * 16;               // bytes of a warp's codes
constexpr int kRowScales = kScalesOfB * kScaleBytes;  // bytes of a row's scales
constexpr int kWarpScales = 8 * 2 * kRowScales;       // bytes: rows g and g + 8, all groups of columns
constexpr u32 kSigns = 0x80808080;

// A product has the columns of a scale. NVFP4's has half of those that wgmma multiplies: the others are zeros of A.
constexpr int kProducts = kScalesProducts ? kScalesOfB : 1;  // of a K block
constexpr bool kHalfZeros = kWeights == Weights::NVFP4;
constexpr int kFragments = kHalfZeros ? 16 : 8;  // registers of half a K block

// The tile's rows of b, counted in blocks from the first group's on; a CTA without columns has the last ones.
__device__ __forceinline__ i64 block_of(const Problem& problem, const Tile& tile) {
    const int blocks_n = (problem.n + kOutBlockN - 1) / kOutBlockN;
    return tile.group * static_cast<i64>(blocks_n) + min(tile.column / kOutBlockN, blocks_n - 1);
}

// Starts to load a K block of the tile's rows of b.
__device__ __forceinline__ void load(u64* full, u8* to, const u8* b_codes, const Problem& problem, const Tile& tile,
                                     int kb) {
    const i64 block = block_of(problem, tile);
    ptx::bulk_load(full, to, b_codes + (block * problem.k_blocks + kb) * kBytesOfB, kBytesOfB);
}

// Eight codes of a row: the half of a fragment in columns 0 to 15, and that in columns 16 to 31.
struct Halves {
    u32 first, last;
};
// e2m1 times 2^(exponent / 8 - 5).
__device__ __forceinline__ Halves decode_e2m1(u32 word, u32 exponent) {
    // 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^-5 in e4m3; 0 has no exponent.
    const u32 low = exponent * 0x01010100 + 0x14100800, high = exponent * 0x01010101 + 0x24201c18;
    const u32 magnitudes = word & 0x77777777;
    return {ptx::permute_bytes(low, high, magnitudes) | (word & kSigns),
            ptx::permute_bytes(low, high, magnitudes >> 16) | (word << 4 & kSigns)};
}
// Two's complement: the lower bits of a code say which of -8 to -1, or of 0 to 7, by its sign.
__device__ __forceinline__ Halves decode_int4(u32 word) {
    const u32 of_four = word & 0x77777777;
    const auto four = [](u32 lower, u32 signs) {
        const u32 negative = ptx::permute_bytes(0xcaccced0, 0xb8c0c4c8, lower);  // -8, -7, -6, -5 and -4 to -1
        const u32 others = ptx::permute_bytes(0x44403800, 0x4e4c4a48, lower);    // 0 to 3 and 4 to 7
        return (negative & signs) | (others & ~signs);
    };
    return {four(of_four, ptx::sign_masks(word)), four(of_four >> 16, ptx::sign_masks(word << 4))};
}

// This thread's fragments of half a K block, 64 columns; `warp`: of all consumers. Zeros of A stay as they are.
template <int kHalf>
__device__ __forceinline__ void decode(u32* a, const u8* block, int warp, int lane) {
    const uint4 four = reinterpret_cast<const uint4*>(block + warp * kWarpCodes)[kHalf * 32 + lane];
    const u32 words[4] = {four.x, four.y, four.z, four.w};
    uint2 of_rows;
    if constexpr (kWeights == Weights::MXFP4)
        of_rows = reinterpret_cast<const uint2*>(block + 8 * kWarpCodes + warp * kWarpScales)[lane / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows g and g + 8 of 32 columns, then of the next 32
        const int columns = i / 2, high = i % 2;
        Halves halves;
        if constexpr (kWeights == Weights::MXFP4) {
            const u32 exponent = ptx::permute_bytes(high ? of_rows.y : of_rows.x, 0, 0x4440 | kHalf * 2 + columns);
            halves = decode_e2m1(words[i], exponent);
        } else if constexpr (kWeights == Weights::NVFP4) {
            halves = decode_e2m1(words[i], 5 * 8);
        } else {
            halves = decode_int4(words[i]);
        }
        u32* const to = a + columns * (kFragments / 2) + high;
        to[0] = halves.first;
        to[kHalfZeros ? 6 : 2] = halves.last;
    }
}

// The scales of this thread's rows g and g + 8 in a K block.
struct RowScales {
    u32 words[kRowScales == 8 ? 4 : 1];

    static __device__ __forceinline__ RowScales of(const u8* block, int warp, int lane) {
        const u8* const from = block + 8 * kWarpCodes + warp * kWarpScales + lane / 4 * (2 * kRowScales);
        RowScales scales;
        if constexpr (kRowScales == 8) {
            const uint4 four = *reinterpret_cast<const uint4*>(from);
            scales.words[0] = four.x, scales.words[1] = four.y, scales.words[2] = four.z, scales.words[3] = four.w;
        } else {
            scales.words[0] = *reinterpret_cast<const u32*>(from);
        }
        return scales;
    }
    // That of row g + 8 * high for the columns of a product.
    __device__ __forceinline__ float at(int high, int product) const {
        const int byte = (high * kScalesOfB + product) * kScaleBytes;
        const u32 pair = words[byte / 4] >> byte / 2 % 2 * 16;  // of bytes
        if constexpr (kScaleBytes == 2)
            return ptx::to_float<false>(pair);
        else
            return ptx::to_float<false>(ptx::e4m3_to_fp16(pair) >> byte % 2 * 16);
    }
};

// sum (+)= product times the scales of its columns. Of four registers two are of row g, and two of row g + 8.
template <int kCount>
__device__ __forceinline__ void add_scaled(float (&sum)[kCount], const float (&product)[kCount],
                                           const RowScales& scales, int index) {
    const float low = scales.at(0, index), high = scales.at(1, index);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float scale = i % 4 < 2 ? low : high;
        sum[i] = index == 0 ? product[i] * scale : sum[i] + product[i] * scale;
    }
}

}  // namespace codes
