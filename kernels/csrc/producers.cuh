// The producer warpgroup: a warp that loads a and b by TMA, and three that multiply their scales.
#pragma once

#include "codes.cuh"
#include "pipeline.cuh"

// The producers' inputs.
struct Operands {
    const ptx::TensorMap &a_map, &b_map;
    const u8* const b_codes;  // with kFourBits, instead of b_map
    const Scales scales;
    int* const tile_counter;
};

// The TMA warp: takes tiles after the `next` one, announces them, and loads this CTA's b and its share of the cluster's
// a. A cluster's first tile is the one with its index; later ones go to whichever cluster asks first.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Operands& operands, const Problem& problem,
                                           Scheduler& scheduler, Tile next, int lane) {
    const auto boxes_of = [](const Tile& tile) { return (tile.rows + kBoxM - 1) / kBoxM; };
    const auto load_b = [&](const Tile& tile, int kb, int stage) {
        ptx::mbarrier_arrive_expect_bytes(&shared.full[stage], kBytesOfB + boxes_of(tile) * kBoxM * kBlockK);
        if constexpr (kFourBits) {
            codes::load(&shared.full[stage], shared.b[stage], operands.b_codes, problem, tile, kb);
            return;
        }
        const int row = tile.group * problem.n * kLoadsOfB + tile.column;
#pragma unroll
        for (int part = 0; part < kLoadsOfB; ++part)  // gates, then the matching ups n rows further on
            ptx::tma_load(&operands.b_map, &shared.full[stage], shared.b[stage] + part * kOutBlockN * kBlockK,
                          kb * kBlockK, row + part * problem.n);
    };
    int loaded_ahead = -1;  // K blocks of the first tile whose b was loaded before the preceding launch was complete
    const int take_at = problem.rank == 0 ? max(problem.k_blocks - kTakeAhead, 0) : -1;
    StageRing stage_ring;
    TileRing tile_ring;
    for (;; tile_ring.advance()) {
        // -- announce the tile
        const Tile tile = problem.part_of(shared.announce(tile_ring, problem.rank, next));
        if (tile.rows < 0) break;
        const int boxes = boxes_of(tile), row = problem.first_row(tile);
        int taken = 0;

        // -- ahead of the first tile: b does not depend on the preceding launch, so its loads go out before the wait
        if (loaded_ahead < 0) {
            loaded_ahead = min(kLoadsAhead, problem.k_blocks);
            if (ptx::elect_one())
#pragma unroll 1
                for (int stage = 0; stage < loaded_ahead; ++stage) load_b(tile, stage, stage);
            __syncwarp();
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
        }

        // -- load the tile, a K block per stage
        StageRing at = stage_ring;
        if (ptx::elect_one()) {
#pragma unroll 1
            for (int kb = 0; kb < problem.k_blocks; ++kb, at.advance()) {
                const int stage = at.index;
                // -- take the next tile: early enough for the answer to be back in time, late enough for clusters to
                // ask in the order in which they finish
                if (kb == take_at) taken = ptx::increment(operands.tile_counter);
                shared.wait_empty(at);
                if (kb >= loaded_ahead) load_b(tile, kb, stage);
#pragma unroll 1
                for (int box = problem.rank; box < boxes; box += kCluster) {
                    ptx::tma_load_to_cluster<kCluster>(&operands.a_map, &shared.full[stage],
                                                       shared.a[stage] + box * kBoxM * kBlockK, kb * kBlockK,
                                                       row + box * kBoxM);
                }
            }
        }
        __syncwarp();
        stage_ring.advance_by(problem.k_blocks);
        loaded_ahead = 0;
        if (problem.rank == 0) next = scheduler.tile(gridDim.x / kCluster + __reduce_add_sync(0xffffffff, taken));
    }

    // -- end
    ptx::grid_dependency_wait();           // a cluster without a tile has not waited yet
    if (problem.rank == 0 && lane == 0) {  // the last cluster to finish resets the counter for the next launch
        __threadfence();
        if (atomicAdd(operands.tile_counter + 1, 1) == gridDim.x / kCluster - 1) {
            operands.tile_counter[0] = 0;
            operands.tile_counter[1] = 0;
        }
    }
}

// A scale warp: writes the product of both operands' scales, so that a consumer multiplies once. The warps take stages
// in turn and load before their stage is free: consumers wait for a stage's slowest load, and scales take the longest.
__device__ __forceinline__ void load_scales(SharedStorage& shared, const Operands& operands, const Problem& problem,
                                            int scale_warp, int lane) {
    const int k_blocks = problem.k_blocks;
    const int blocks_n = (problem.n + floats::kScaleBlock - 1) / floats::kScaleBlock;  // of the gates alone, with them
    int next = scale_warp;  // this warp's next K block, counted from the tile's first
    StageRing stage_ring;
    stage_ring.advance(next);
    for (TileRing tile_ring;; tile_ring.advance()) {
        const Tile tile = shared.announced_tile(tile_ring, problem);
        if (tile.rows < 0) break;

        // -- locate the tile's scales
        const int block_n = min(tile.column / floats::kScaleBlock, blocks_n - 1);
        const i64 b_block = static_cast<i64>(tile.group) * blocks_n * kLoadsOfB + block_n;
        const float* const b_scale = operands.scales.b + b_block * k_blocks;
        const int b_stride = (kGlu ? blocks_n : block_n < blocks_n - 1) * k_blocks;  // to the other part's scales
        const int last = tile.row + tile.rows - 1;
        u32 a_scale[kBlockM / 32];  // rows past the tile's end repeat its last row; their results are never read
#pragma unroll
        for (int i = 0; i < kBlockM / 32; ++i)
            a_scale[i] = tile.group * operands.scales.a_stride_group +
                         min(tile.row + i * 32 + lane, last) * operands.scales.a_stride_m;

        // -- load this warp's K blocks of the tile
        float a_value[kScalesAhead][kBlockM / 32], b_value[kScalesAhead][kScaleParts];
        const auto load = [&](int ahead, int kb) {
#pragma unroll
            for (int i = 0; i < kBlockM / 32; ++i)  // past L1: shared memory leaves it no room
                a_value[ahead][i] = __ldcg(operands.scales.a + a_scale[i] + kb * operands.scales.a_stride_k);
#pragma unroll
            for (int part = 0; part < kScaleParts; ++part)
                b_value[ahead][part] = kScalesProducts ? 1.0f : __ldg(b_scale + part * b_stride + kb);
        };
#pragma unroll
        for (int ahead = 0; ahead < kScalesAhead; ++ahead)
            if (next + ahead * kScaleWarps < k_blocks) load(ahead, next + ahead * kScaleWarps);
        while (next < k_blocks) {
#pragma unroll
            for (int ahead = 0; ahead < kScalesAhead && next < k_blocks; ++ahead) {
                shared.wait_empty(stage_ring);
#pragma unroll
                for (int part = 0; part < kScaleParts; ++part)
#pragma unroll
                    for (int i = 0; i < kBlockM / 32; ++i)
                        shared.scales[stage_ring.index][part][i * 32 + lane] = a_value[ahead][i] * b_value[ahead][part];
                shared.publish(stage_ring.index);
                if (next + kScalesAhead * kScaleWarps < k_blocks) load(ahead, next + kScalesAhead * kScaleWarps);
                next += kScaleWarps;
                stage_ring.advance(kScaleWarps);
            }
        }
        next -= k_blocks;
    }
}
