// A variant at compile time: TileConfig in kernels/backends/hopper/tiles.py, and what follows from it.
#pragma once

#include "floats.cuh"

constexpr bool kContiguous = CONTIGUOUS;  // rows of all groups follow each other; else each group has max_m places
constexpr bool kSwapAb = SWAP_AB;         // b, not a, is on wgmma's M side
constexpr bool kGlu = GLU;                // out is activated gates times ups, in FP8 with scales
enum class Weights { FP8, MXFP4, INT4, NVFP4 };
constexpr Weights kWeights = Weights::WEIGHTS;        // b's format
constexpr bool kFourBits = kWeights != Weights::FP8;  // b in codes: codes.cuh
constexpr bool kStoresBoxes = !kSwapAb && !kGlu;
constexpr int kBlockM = BLOCK_M;  // rows of a in a tile, at most
constexpr int kBlockN = BLOCK_N;  // rows of b in a tile; with an activation, 64 gate rows and the matching 64 up rows
constexpr int kBlockK = floats::kScaleBlock;                    // columns that share a scale; bytes of a swizzled row
constexpr int kLoadsOfB = kGlu && !kFourBits ? 2 : 1;           // a K block of b takes as many
constexpr int kOutBlockN = kGlu ? kBlockN / 2 : kBlockN;        // columns of out in a tile; rows of b per TMA load
constexpr int kScalesOfB = kBlockK / GROUP_SIZE;                // with kFourBits: of a row, in a K block
constexpr int kScaleBytes = kWeights == Weights::INT4 ? 2 : 1;  // of each
constexpr int kBytesOfB = kBlockN * (kFourBits ? kBlockK / 2 + kScalesOfB * kScaleBytes : kBlockK);  // of a K block
// Scales multiply products of their columns, and a scale of each row the final sums. MXFP4's scales are in exponents.
constexpr bool kScalesProducts = kFourBits && kWeights != Weights::MXFP4;
constexpr int kStages = STAGES;                // K blocks of a and b in flight
constexpr int kCluster = CLUSTER;              // CTAs with neighboring columns that load a's rows together
constexpr int kTileN = kOutBlockN * kCluster;  // columns of out in a cluster's tile
constexpr int kBoxM = BOX_M;                   // rows of a per TMA load
constexpr int kCtasPerSm = CTAS_PER_SM;
constexpr int kArrivals = ARRIVALS;  // lanes that arrive at a barrier for a warp: one, or all for racecheck

constexpr int kConsumerGroups = kSwapAb ? 2 : kBlockM / 64;     // warpgroups
constexpr bool kMaySkip = !kSwapAb || (kCluster > 1 && !kGlu);  // a warpgroup may have no rows or columns of a tile
constexpr int kConsumerWarps = kConsumerGroups * 4;
constexpr int kScaleWarps = 3;
constexpr int kThreads = (kConsumerGroups + 1) * 128;
constexpr int kHeightStep = kSwapAb ? 16 : 64;  // a tile's height is rounded up to a multiple of this
// Scales of b in a tile: gate and up, or neighbors.
constexpr int kScaleParts = kLoadsOfB > 1 || floats::kScaleBlock % kBlockN != 0 ? 2 : 1;
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
