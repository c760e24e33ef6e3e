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
constexpr bool kSwiglu = SWIGLU;    // out is silu(gate) * up in FP8, with a scale per row and 128 columns
constexpr int kBlockM = BLOCK_M;    // most rows of a in a tile
constexpr int kWeightRows = 128;    // rows of b in a tile; with SwiGLU 64 gates, then their ups
constexpr int kBlockN = kSwiglu ? 64 : kWeightRows;  // columns of out in a tile
constexpr int kBoxN = kSwiglu ? 64 : 128;  // rows of b that one TMA load brings
constexpr int kBlockK = 128;        // one scale of a; bytes of a swizzled row
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;  // CTAs with neighbouring columns that load the tokens together
constexpr int kBoxM = BOX_M;       // rows of a that one TMA load brings

constexpr int kConsumerGroups = kSwapped ? 2 : kBlockM / 64;  // warpgroups
constexpr int kConsumerWarps = kConsumerGroups * 4;
constexpr int kScaleWarps = 3;
static_assert(kStages >= kScaleWarps, "a scale warp tells two rounds of the ring apart by one phase bit");
constexpr int kThreads = (kConsumerGroups + 1) * 128;
constexpr int kHeightStep = kSwapped ? 16 : 64;  // what a tile's height is rounded up to
// Of a warpgroup's results on their way out.
constexpr u32 kStagingBytes = kSwiglu ? 4096 : kSwapped ? 2 * 16 * 128 : 64 * kBlockN * 2;
constexpr int kScaleParts = kSwiglu ? 2 : 1;  // gate and up have weight scales of their own

// Tiles whose records somebody may still read: with one K block a tile, a scale warp's next block can be the oldest of
// a full ring, it has the tiles of the other warps' blocks before that to go through, and one more is announced ahead.
constexpr int kTiles = kStages + kScaleWarps;
constexpr int kClaimAhead = 4;  // K blocks before its last loads a cluster asks for another tile

// One lane arrives at a barrier for its warp. racecheck does not follow that, so the sanitizer's build lets all arrive.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
constexpr int kArrivals = EVERY_LANE_ARRIVES ? 32 : 1;  // of a warp

// What the 128 columns of a scale tell each other of their rows' largest numbers.
#if SWIGLU
struct Largest {  // both CTAs of a pair, warp to warp; a tile's must be read before the next but one's comes
    float2 theirs[2][kConsumerWarps][8];  // rows r and r + 8 of the warp's 16
    u64 there[2][kConsumerWarps];
};
#endif

// Starts on 1024 bytes, as the swizzle of the stages asks; the scheduler's table follows, sized by the launch.
struct SharedStorage {
    u8 weights[kStages][kWeightRows * kBlockK];
    u8 tokens[kStages][kBlockM * kBlockK];
    u8 staging[kConsumerGroups][kStagingBytes];
    float scales[kStages][kScaleParts][kBlockM];  // of a's row times of b's block
#if SWIGLU
    Largest largest;
#endif
    Tile tiles[kTiles];
    u64 announced[kTiles];  // tiles[i] is there
    u64 full[kStages];
    u64 empty[kStages];
};
static_assert(sizeof(SharedStorage) == STORAGE_BYTES, "kernels/backends/hopper/tiles.py computes another size");

// Position in a ring of stages or tiles; the phase bit flips each time around.
template <int kLength>
struct Position {
    int index = 0;
    u32 phase = 0;
    __device__ void advance(int steps = 1) {  // kLength at most
        index += steps;
        if (index >= kLength) {
            index -= kLength;
            phase ^= 1;
        }
    }
};
using Pipeline = Position<kStages>;
using Walk = Position<kTiles>;

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

// A CTA's part of its cluster's tile; without columns where only the other CTA has some.
__device__ __forceinline__ Tile part_of(Tile tile, int rank) {
    tile.column += rank * kBlockN;
    return tile;
}

// Where results go.
struct Output {
#if SWIGLU
    u8* const out;                    // e4m3 [rows, n]
    float* const scales;              // [n / 128, scale_stride], a column for each row of out
    const u32 scale_stride;
    const float alpha, limit;         // of the activation
#else
    u16* const out;                   // bf16 [rows, n]
    const ptx::TensorMap* const map;  // of out, box 16 x 64, 128-byte swizzle
#endif
    const int n, rows_per_group, rank;

    __device__ __forceinline__ int row(const Tile& part) const { return part.group * rows_per_group + part.row; }
};

// The next tile of the cluster, for the TMA warp: its first CTA finds it and tells everybody who waits for it.
template <typename Find>
__device__ __forceinline__ Tile announce(SharedStorage& shared, const Walk& walk, int rank, Find find) {
    u64* announced = &shared.announced[walk.index];
    Tile tile;
    if constexpr (kCluster == 1) {
        tile = find();
        if (ptx::elect_one()) {
            shared.tiles[walk.index] = tile;
            ptx::mbarrier_arrive(announced);
        }
        __syncwarp();
    } else {
        if (rank == 0) {
            tile = find();
            const u32 lane = threadIdx.x % 32;
            if (lane < kCluster) {
                const int4 record = {tile.group, tile.row, tile.rows, tile.column};
                ptx::store_to_cta(&shared.tiles[walk.index], record, announced, lane);
            }
        }
        if (ptx::elect_one()) ptx::mbarrier_arrive_expect_bytes(announced, sizeof(Tile));
        __syncwarp();
        ptx::mbarrier_wait(announced, walk.phase);
        tile = shared.tiles[walk.index];
    }
    return tile;
}

// The last cluster to leave puts both numbers back for the next launch.
__device__ __forceinline__ void leave(int* claims, int clusters) {
    __threadfence();
    if (atomicAdd(claims + 1, 1) == clusters - 1) {
        claims[0] = 0;
        claims[1] = 0;
    }
}

using Scheduler = TileScheduler<kLayout, kBlockM, kBlockN * kCluster, kHeightStep>;
