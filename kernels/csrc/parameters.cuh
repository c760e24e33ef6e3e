// What a launch passes: one struct, as kernels/backends/hopper/parameters.py fills it, and as each role sees it.
#pragma once

#include "config.cuh"
#include "scheduler.cuh"

// The scales of both operands.
struct Scales {
    const float* a;
    u32 a_stride_group, a_stride_m, a_stride_k;
    const float* b;  // [num_groups, ceil(rows of b / 128), k / 128]; kScalesProducts: one a row, in the order of tiles
};

// `Output` is the epilogue's own part.
template <typename Output>
struct GemmParameters {
    ptx::TensorMap a_map;    // [rows, k], box kBoxM x 128, 128-byte swizzle
    ptx::TensorMap b_map;    // [num_groups * rows of b, k], box kOutBlockN x 128, likewise; kFourBits: b's address
    ptx::TensorMap out_map;  // bf16 [rows, n], box 16 x 64, likewise; only for kStoresBoxes
    Scales scales;
    Groups groups;
    Output output;
    int extents_ready;  // complete before the preceding launch began: read without waiting for it
    int* tile_counter;  // [2]: tiles taken beyond each cluster's first, clusters done; both 0
};

// The problem, as every role of a CTA needs it.
struct Problem {
    const int n, k_blocks;
    const int rows_per_group;  // max_m; 0 in the contiguous layout, where Tile::row counts from the first row of all
    const int rank;            // of this CTA in its cluster

    // This CTA's part of its cluster's tile; its columns lie past n if only the other CTA has any.
    __device__ __forceinline__ Tile part_of(Tile tile) const {
        tile.column += rank * kOutBlockN;
        return tile;
    }
    // The tile's first row in a and out.
    __device__ __forceinline__ int first_row(const Tile& tile) const { return tile.group * rows_per_group + tile.row; }
};
