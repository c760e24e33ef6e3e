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
constexpr int kBlockN = 128;        // columns of out (rows of b) in a tile: one block of weight scales
constexpr int kBlockK = 128;        // one scale of a; bytes of a swizzled row
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;  // CTAs with neighbouring columns that load the tokens together
constexpr int kBoxM = BOX_M;       // rows of a that one TMA load brings

constexpr int kConsumerGroups = kSwapped ? kBlockN / 64 : kBlockM / 64;  // warpgroups, 64 rows of wgmma's M each
constexpr int kConsumerWarps = kConsumerGroups * 4;
constexpr int kScaleWarps = 3;
static_assert(kStages >= kScaleWarps, "a scale warp tells two rounds of the ring apart by one phase bit");
constexpr int kThreads = (kConsumerGroups + 1) * 128;
constexpr int kHeightStep = kSwapped ? 16 : 64;  // what a tile's height is rounded up to
constexpr u32 kStagingPitch = kBlockN * 2 + 16;  // bytes of a straight row on its way out; padded against bank conflicts
constexpr u32 kStagingBytes = kSwapped ? 2 * 16 * 128 : 64 * kStagingPitch;  // of a warpgroup

// What the consumers need to know of a tile. The producer writes it ahead of the tile's first stage and ends the walk
// with a negative one. A record outlives its tile: the ring is one longer than the tiles that can be in flight.
struct TileRecord {
    i64 offset;   // of the tile's first element in out, for this CTA
    int rows;     // rows to write; none where only the other CTA of the cluster has columns; -1 ends the walk
    int columns;  // columns to the right edge of out, maybe more than the tile has
};

// One lane arrives at a barrier for its warp. racecheck does not follow that, so the sanitizer's build lets all arrive.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
constexpr int kArrivals = EVERY_LANE_ARRIVES ? 32 : 1;  // of a warp

// Starts on 1024 bytes, as the swizzle of the stages asks; the scheduler's table follows, sized by the launch.
struct SharedStorage {
    u8 weights[kStages][kBlockN * kBlockK];
    u8 tokens[kStages][kBlockM * kBlockK];
    u8 staging[kConsumerGroups][kStagingBytes];
    float scales[kStages][kBlockM];  // of a's row times of b's block
    u64 full[kStages];
    u64 empty[kStages];
    TileRecord tiles[kStages + 1];
    int scratch[kThreads / 32];
};
static_assert(sizeof(SharedStorage) == STORAGE_BYTES, "kernels/tiles.py computes another size");

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

// A warp has written what a stage's barrier guards.
__device__ __forceinline__ void publish(u64* full) {
    __syncwarp();
    if (threadIdx.x % 32 < kArrivals) ptx::mbarrier_arrive(full);
}

// A warp has read what a stage's barrier guards; every CTA that writes there must know.
__device__ __forceinline__ void release(u64* empty) {
    const u32 lane = threadIdx.x % 32;
    __syncwarp();
    if constexpr (kArrivals == 1) {
        if (lane < kCluster) ptx::mbarrier_arrive_at<kCluster>(empty, lane);
    } else {
        for (u32 rank = 0; rank < kCluster; ++rank) ptx::mbarrier_arrive_at<kCluster>(empty, rank);
    }
}

using Scheduler = TileScheduler<kLayout, kBlockM, kBlockN * kCluster, kHeightStep>;
