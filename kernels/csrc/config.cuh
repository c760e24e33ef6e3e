// Compile-time parameters of a variant (TileConfig in kernels/backends/hopper/tiles.py), and the sizes of a launch.
#pragma once

#include "floats.cuh"
#include "scheduler.cuh"

constexpr Layout kLayout = MASKED ? Layout::kMasked : Layout::kContiguous;
constexpr bool kSwapAb = SWAP_AB;      // b, not a, is on wgmma's M side
constexpr bool kSwiglu = SWIGLU;       // out is silu(gate) * up in FP8, with a scale per row and 128 columns
constexpr bool kOtherGlu = OTHER_GLU;  // with SwiGLU: biases, and the variations of another gated activation
constexpr int kBlockM = BLOCK_M;       // rows of a in a tile, at most
constexpr int kBlockN = BLOCK_N;       // rows of b in a tile; with SwiGLU, 64 gate rows and the matching 64 up rows
constexpr int kOutBlockN = kSwiglu ? kBlockN / 2 : kBlockN;  // columns of out in a tile; rows of b per TMA load
constexpr int kBlockK = floats::kScaleBlock;                 // columns that share a scale; bytes of a swizzled row
constexpr int kLoadsOfB = kSwiglu ? 2 : 1;                   // a K block of b takes as many
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;  // CTAs with neighboring columns that load the rows of a together
constexpr int kBoxM = BOX_M;       // rows of a per TMA load
constexpr int kCtasPerSm = CTAS_PER_SM;

constexpr int kConsumerGroups = kSwapAb ? 2 : kBlockM / 64;  // warpgroups
constexpr int kConsumerWarps = kConsumerGroups * 4;
constexpr int kScaleWarps = 3;
constexpr int kThreads = (kConsumerGroups + 1) * 128;
constexpr int kHeightStep = kSwapAb ? 16 : 64;  // a tile's height is rounded up to a multiple of this
// Scales of b in a tile: gate and up, or neighbors.
constexpr int kScaleParts = kSwiglu || floats::kScaleBlock % kBlockN != 0 ? 2 : 1;
// K blocks whose scales a warp has in flight.
constexpr int kScalesAhead = kBlockM <= 64 ? 4 : kBlockM <= 128 || kCluster == 1 ? 2 : 1;
// K blocks of b that are loaded before the preceding launch is complete: they go through the SM's port, 64 bytes a
// cycle, before the first rows of a. With few rows weights are awaited longest, with many the first product.
constexpr int kLoadsAhead = kBlockM <= 64 ? 4 : 1;
static_assert(kLoadsAhead <= kStages, "the ring has no room for them");
static_assert(kStages >= kScaleWarps, "a scale warp distinguishes two rounds of the ring by one phase bit");

// Registers per thread after setmaxnreg, of 65536 in all: with fewer than 56 for a producer NVRTC 13.5 spills in the
// scheduler. A single consumer warpgroup has enough without, unless its SM has two.
constexpr bool kMovesRegisters = kConsumerGroups > 1 || kCtasPerSm > 1;
constexpr int kConsumerRegisters = kCtasPerSm == 2        ? (kConsumerGroups == 1 ? 200 : 88)
                                   : kConsumerGroups == 2 ? 224
                                                          : 152;
constexpr int kProducerRegisters = 56;
static_assert((kConsumerGroups * kConsumerRegisters + kProducerRegisters) * 128 * kCtasPerSm <= 65536,
              "an SM has fewer registers");

// Tiles whose records may still be read. The worst case is one K block per tile: a scale warp's next block may be the
// oldest in a full ring, the other scale warps may be at earlier blocks, and one more tile is announced ahead.
constexpr int kTiles = kStages + kScaleWarps;
constexpr int kTakeAhead = 4;  // a cluster takes its next tile this many K blocks before the end of the current one

// One lane arrives at a barrier for its whole warp. racecheck cannot track that, so in the sanitizer build all arrive.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
constexpr int kArrivals = EVERY_LANE_ARRIVES ? 32 : 1;  // per warp

using Scheduler = TileScheduler<kLayout, kBlockM, kOutBlockN * kCluster, kHeightStep>;

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
