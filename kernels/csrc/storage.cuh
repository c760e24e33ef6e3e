// The layout of a CTA's shared memory, and how its warps hand stages and tiles to each other.
#pragma once

#include "config.cuh"
#include "epilogue.cuh"
#include "ptx.cuh"

// Aligned to 1024 bytes, which the swizzle of the stages needs; the scheduler's table follows it.
struct SharedStorage {
    u8 b[kStages][kBlockN * kBlockK];
    u8 a[kStages][kBlockM * kBlockK];
    TileEpilogue::Shared epilogue;
    float scales[kStages][kScaleParts][kBlockM];  // a row's scale of a times its block's scale of b
    Tile tiles[kTiles];
    u64 announced[kTiles];  // barriers: tiles[i] has been written
    u64 full[kStages];      // barriers: the stage has been loaded
    u64 empty[kStages];     // barriers: the stage has been read
};
static_assert(sizeof(SharedStorage) == STORAGE_BYTES, "kernels/backends/hopper/tiles.py computes another size");

// Position in a ring of stages or tiles; the phase bit flips each time around.
template <int kLength>
struct Position {
    int index = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance_by(int steps) {
        const int rounds = (index + steps) / kLength;
        index += steps - rounds * kLength;
        phase ^= rounds & 1;
    }
    __device__ void advance(int steps = 1) {  // by kLength at most
        index += steps;
        if (index >= kLength) {
            index -= kLength;
            phase ^= 1;
        }
    }
};
using StageRing = Position<kStages>;
using TileRing = Position<kTiles>;

// A warp has written its share of a stage.
__device__ __forceinline__ void publish(u64* full) {
    __syncwarp();
    if (threadIdx.x % 32 < kArrivals) ptx::mbarrier_arrive(full);
}

// A warp has read a stage; every CTA that writes there must know.
__device__ __forceinline__ void release(u64* empty) {
    const u32 lane = threadIdx.x % 32;
    __syncwarp();
    if constexpr (kArrivals == 1) {
        if (lane < kCluster) ptx::mbarrier_arrive_at<kCluster>(empty, lane);
    } else {
        for (u32 rank = 0; rank < kCluster; ++rank) ptx::mbarrier_arrive_at<kCluster>(empty, rank);
    }
}

// The cluster's next tile, for the TMA warp: the first CTA, which knows it, announces it to every waiting warp.
__device__ __forceinline__ Tile announce(SharedStorage& shared, const TileRing& tile_ring, int rank, Tile tile) {
    u64* announced = &shared.announced[tile_ring.index];
    if constexpr (kCluster == 1) {
        if (ptx::elect_one()) {
            shared.tiles[tile_ring.index] = tile;
            ptx::mbarrier_arrive(announced);
        }
        __syncwarp();
    } else {
        if (rank == 0) {
            const u32 lane = threadIdx.x % 32;
            if (lane < kCluster) {
                const int4 record = {tile.group, tile.row, tile.rows, tile.column};
                ptx::store_to_cta(&shared.tiles[tile_ring.index], record, announced, lane);
            }
        }
        if (ptx::elect_one()) ptx::mbarrier_arrive_expect_bytes(announced, sizeof(Tile));
        __syncwarp();
        ptx::mbarrier_wait(announced, tile_ring.phase);
        tile = shared.tiles[tile_ring.index];
    }
    return tile;
}

// The tile announced at this position, for all other warps.
__device__ __forceinline__ Tile announced_tile(SharedStorage& shared, const TileRing& tile_ring,
                                               const Problem& problem) {
    ptx::mbarrier_wait(&shared.announced[tile_ring.index], tile_ring.phase);
    return problem.part_of(shared.tiles[tile_ring.index]);
}

// The last cluster to finish resets the counter for the next launch.
__device__ __forceinline__ void finish(int* tile_counter, int clusters) {
    __threadfence();
    if (atomicAdd(tile_counter + 1, 1) == clusters - 1) {
        tile_counter[0] = 0;
        tile_counter[1] = 0;
    }
}
