// What a variant is compiled with (TileConfig of kernels/backends/hopper/tiles.py), and what a launch adds to it.
#pragma once

#include "scheduler.cuh"

constexpr Layout kLayout = MASKED ? Layout::kMasked : Layout::kContiguous;
constexpr bool kSwapAb = SWAP_AB;  // b instead of a on wgmma's M side
constexpr bool kSwiglu = SWIGLU;   // out is silu(gate) * up in FP8, with a scale per row and 128 columns
constexpr int kBlockM = BLOCK_M;   // rows of a in a tile, at most
constexpr int kBlockN = 128;       // rows of b in a tile; with SwiGLU, 64 gate rows and the matching 64 up rows
constexpr int kOutBlockN = kSwiglu ? kBlockN / 2 : kBlockN;  // columns of out in a tile; rows of b per TMA load
constexpr int kBlockK = 128;                                 // columns that share a scale; bytes of a swizzled row
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;  // CTAs with neighbouring columns that load the rows of a together
constexpr int kBoxM = BOX_M;       // rows of a per TMA load

constexpr int kConsumerGroups = kSwapAb ? 2 : kBlockM / 64;  // warpgroups
constexpr int kConsumerWarps = kConsumerGroups * 4;
constexpr int kScaleWarps = 3;
constexpr int kThreads = (kConsumerGroups + 1) * 128;
constexpr int kHeightStep = kSwapAb ? 16 : 64;  // a tile's height is rounded up to a multiple of this
constexpr int kScaleParts = kSwiglu ? 2 : 1;    // gate and up have b scales of their own
static_assert(kStages >= kScaleWarps, "a scale warp tells two rounds of the ring apart by one phase bit");

// Registers per thread once producers have given some to consumers. With swap-AB a CTA starts with 384 * 168 = 64512:
// 224 are plenty for a consumer, and with 40 for a producer NVRTC 13.5 spills in the scheduler.
constexpr int kConsumerRegisters = kSwapAb ? 224 : 152, kProducerRegisters = kSwapAb ? 56 : 40;

// Tiles whose records may still be read: with one K block per tile, a scale warp's next block can be the oldest of a
// full ring, before it come the tiles of the other warps' blocks, and one more is announced ahead.
constexpr int kTiles = kStages + kScaleWarps;
constexpr int kTakeAhead = 4;  // K blocks before the end of its tile at which a cluster takes the next one

// One lane arrives at a barrier for its warp. racecheck cannot follow that, so the sanitizer's build has all arrive.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
constexpr int kArrivals = EVERY_LANE_ARRIVES ? 32 : 1;  // per warp

using Scheduler = TileScheduler<kLayout, kBlockM, kOutBlockN * kCluster, kHeightStep>;

// What every role of a CTA needs to know of the problem.
struct Problem {
    const int n, k_blocks;
    const int rows_per_group;  // max_m; 0 in the contiguous layout, where a tile's row counts from the first of all
    const int rank;            // of this CTA in its cluster

    // This CTA's part of its cluster's tile; its columns may lie past n where only the other CTA has some.
    __device__ __forceinline__ Tile part_of(Tile tile) const {
        tile.column += rank * kOutBlockN;
        return tile;
    }
    // The tile's first row in a and out.
    __device__ __forceinline__ int first_row(const Tile& tile) const { return tile.group * rows_per_group + tile.row; }
};
