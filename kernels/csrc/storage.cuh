// What a variant is compiled with, and how its CTA's shared memory is cut up.
#pragma once

#include "ptx.cuh"
#include "scheduler.cuh"

#if MASKED
constexpr Layout kLayout = Layout::kMasked;
#else
constexpr Layout kLayout = Layout::kContiguous;
#endif
constexpr bool kSwapped = SWAPPED;  // weights instead of tokens on wgmma's M side
constexpr int kBlockM = BLOCK_M;    // most rows of a in a tile
constexpr int kBlockN = 128;        // columns of out (rows of b) a CTA: one scale block
constexpr int kBlockK = 128;        // one scale of a; bytes of a swizzled row
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;  // CTAs with neighbouring columns that load the tokens together
constexpr int kBoxM = BOX_M;       // rows of a that one TMA load brings
constexpr int kBanks = BANKS;      // accumulators a consumer has in flight

constexpr int kConsumerGroups = kSwapped ? kBlockN / 64 : kBlockM / 64;  // warpgroups, 64 rows of wgmma's M each
constexpr int kConsumerWarps = kConsumerGroups * 4;
constexpr int kScaleWarps = 3;
constexpr int kThreads = (kConsumerGroups + 1) * 128;
constexpr int kHeightStep = kSwapped ? 16 : 64;  // what a tile's height is rounded up to
constexpr u32 kStagingBytes = kSwapped ? 2 * 16 * 128 : 4 * 16 * 64;  // a warpgroup's rows of out on their way to memory

// What the consumers need to know of a tile. The producer writes it ahead of the tile's first stage and ends the walk
// with a tile of no rows. A record outlives its tile: the ring is one longer than the tiles that can be in flight.
struct TileRecord {
    i64 offset;   // of the tile's first element in out, for this CTA
    int rows;     // rows to write; 0 ends the walk
    int columns;  // columns to the right edge of out; may be more than the tile has, or none
};

struct alignas(1024) SharedStorage {
    u8 weights[kStages][kBlockN * kBlockK];
    u8 tokens[kStages][kBlockM * kBlockK];
    u8 staging[kConsumerGroups][kStagingBytes];
    float scales[kStages][kBlockM];  // of a's row times of b's block
    u64 full[kStages];
    u64 empty[kStages];
    TileRecord tiles[kStages + 1];
    int scratch[kThreads / 32];
    int groups[1];  // the scheduler's table, sized by the launch
};

// Position in the ring of stages; the phase bit flips each time around.
struct Pipeline {
    int stage = 0;
    u32 phase = 0;
    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

using Scheduler = TileScheduler<kLayout, kBlockM, kBlockN * kCluster, kHeightStep>;
