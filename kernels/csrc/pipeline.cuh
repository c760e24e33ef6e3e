// The shared memory of a CTA, and how its warps hand each other stages of the ring and tiles.
#pragma once

#include "epilogue_bf16.cuh"
#include "epilogue_glu.cuh"
#include "epilogue_swap_ab.cuh"
#include "epilogue_swap_ab_glu.cuh"
#include "parameters.cuh"

using Epilogue = EPILOGUE;  // a type and a file for each way in which results leave
using Parameters = GemmParameters<Epilogue::Output>;

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

// Aligned to 1024 bytes, which the swizzle of the stages needs; the scheduler's table follows it.
struct SharedStorage {
    static_assert(kStages * kBytesOfB % 1024 == 0, "a would not be aligned");
    u8 b[kStages][kBytesOfB];
    u8 a[kStages][kBlockM * kBlockK];
    Epilogue::Shared epilogue;
    float scales[kStages][kScaleParts][kBlockM];  // a row's scale of a times its block's scale of b
    Tile tiles[kTiles];
    u64 announced[kTiles];  // barriers: tiles[i] has been written
    u64 full[kStages];      // barriers: the stage has been loaded
    u64 empty[kStages];     // barriers: the stage has been read

    __device__ __forceinline__ void init_barriers() {
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::mbarrier_init(&full[stage], 1 + kArrivals);  // the TMA warp's leader, a scale warp
            ptx::mbarrier_init(&empty[stage], kConsumerWarps * kArrivals * kCluster);
        }
        for (int i = 0; i < kTiles; ++i) ptx::mbarrier_init(&announced[i], 1);
        epilogue.init_barriers();
        ptx::fence_mbarrier_init();
    }

    // ---- stages: a producer waits for an empty one, a consumer for a full one
    __device__ __forceinline__ void wait_empty(const StageRing& at) {
        ptx::mbarrier_wait(&empty[at.index], at.phase ^ 1);
    }
    __device__ __forceinline__ void wait_full(const StageRing& at) { ptx::mbarrier_wait(&full[at.index], at.phase); }
    // A scale warp has written its share of a stage.
    __device__ __forceinline__ void publish(int stage) {
        __syncwarp();
        if (threadIdx.x % 32 < kArrivals) ptx::mbarrier_arrive(&full[stage]);
    }
    // A consumer warp has read a stage; every CTA that writes there must know.
    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        ptx::mbarrier_arrive_at_all<kCluster, kArrivals>(&empty[stage]);
    }

    // ---- tiles
    // The cluster's next tile, for the TMA warp: the first CTA, which knows it, announces it to every waiting warp.
    __device__ __forceinline__ Tile announce(const TileRing& at, int rank, Tile tile) {
        u64* const barrier = &announced[at.index];
        if constexpr (kCluster == 1) {
            if (ptx::elect_one()) {
                tiles[at.index] = tile;
                ptx::mbarrier_arrive(barrier);
            }
            __syncwarp();
        } else {
            const u32 lane = threadIdx.x % 32;
            if (rank == 0 && lane < kCluster) {
                const int4 record = {tile.group, tile.row, tile.rows, tile.column};
                ptx::store_to_cta(&tiles[at.index], record, barrier, lane);
            }
            if (ptx::elect_one()) ptx::mbarrier_arrive_expect_bytes(barrier, sizeof(Tile));
            __syncwarp();
            ptx::mbarrier_wait(barrier, at.phase);
            tile = tiles[at.index];
        }
        return tile;
    }
    // The tile announced at this position, for all other warps.
    __device__ __forceinline__ Tile announced_tile(const TileRing& at, const Problem& problem) {
        ptx::mbarrier_wait(&announced[at.index], at.phase);
        return problem.part_of(tiles[at.index]);
    }
};
static_assert(sizeof(SharedStorage) == STORAGE_BYTES, "kernels/backends/hopper/tiles.py computes another size");
