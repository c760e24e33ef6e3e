// Grouped FP8 GEMM for Hopper: out[rows of g] = a[rows of g] * b[g]^T with 1x128 scales on a and 128x128 on b.
//
// A CTA is persistent and takes tiles of all groups from a tile counter. One producer warpgroup (a warp for TMA, three
// for scales) feeds the consumer warpgroups through a ring of stages; with CLUSTER 2 a pair of CTAs takes neighboring
// columns of the same rows, and each CTA loads half of the rows of a for both.
#include "config.cuh"
#include "consumer_normal.cuh"
#include "consumer_swap_ab.cuh"
#include "epilogue.cuh"
#include "scheduler.cuh"
#include "storage.cuh"

// The producers' inputs.
struct Operands {
    const ptx::TensorMap &a_map, &b_map;
    const float* const a_scales;
    const u32 scale_stride_group, scale_stride_m, scale_stride_k;
    const float* const b_scales;
};

// The TMA warp: takes tiles after the `next` one, announces them, and loads this CTA's b and its share of the cluster's
// a. A cluster's first tile is the one with its index; later ones go to whichever cluster asks first.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Operands& operands, const Problem& problem,
                                           Scheduler& scheduler, Tile next, int* tile_counter, int lane) {
    const auto boxes_of = [](const Tile& tile) { return (tile.rows + kBoxM - 1) / kBoxM; };
    const auto load_b = [&](const Tile& tile, int kb, int stage) {
        const int row = tile.group * problem.n * kLoadsOfB + tile.column;
        ptx::mbarrier_arrive_expect_bytes(&shared.full[stage], (kBlockN + boxes_of(tile) * kBoxM) * kBlockK);
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
        const Tile tile = problem.part_of(announce(shared, tile_ring, problem.rank, next));
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
                if (kb == take_at) taken = ptx::increment(tile_counter);
                ptx::mbarrier_wait(&shared.empty[stage], at.phase ^ 1);
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
    ptx::grid_dependency_wait();  // a cluster without a tile has not waited yet
    if (problem.rank == 0 && lane == 0) finish(tile_counter, gridDim.x / kCluster);
}

// A scale warp: writes the product of both operands' scales, so that a consumer multiplies once. The warps take stages
// in turn and load before their stage is free: consumers wait for a stage's slowest load, and scales take the longest.
__device__ __forceinline__ void load_scales(SharedStorage& shared, const Operands& operands, const Problem& problem,
                                            int scale_warp, int lane) {
    const int k_blocks = problem.k_blocks;
    // With SwiGLU, those of the gates alone.
    const int blocks_n = (problem.n + floats::kScaleBlock - 1) / floats::kScaleBlock;
    int next = scale_warp;  // this warp's next K block, counted from the tile's first
    StageRing stage_ring;
    stage_ring.advance(next);
    for (TileRing tile_ring;; tile_ring.advance()) {
        const Tile tile = announced_tile(shared, tile_ring, problem);
        if (tile.rows < 0) break;

        // -- locate the tile's scales
        const int block_n = min(tile.column / floats::kScaleBlock, blocks_n - 1);
        const i64 b_block = static_cast<i64>(tile.group) * blocks_n * kLoadsOfB + block_n;
        const float* const b_scale = operands.b_scales + b_block * k_blocks;
        const int b_stride = (kSwiglu ? blocks_n : block_n < blocks_n - 1) * k_blocks;  // to the other part's scales
        const int last = tile.row + tile.rows - 1;
        u32 a_scale[kBlockM / 32];  // rows past the tile's end repeat its last row; their results are never read
#pragma unroll
        for (int i = 0; i < kBlockM / 32; ++i)
            a_scale[i] = tile.group * operands.scale_stride_group +
                         min(tile.row + i * 32 + lane, last) * operands.scale_stride_m;

        // -- load this warp's K blocks of the tile
        float a_value[kScalesAhead][kBlockM / 32], b_value[kScalesAhead][kScaleParts];
        const auto load = [&](int ahead, int kb) {
#pragma unroll
            for (int i = 0; i < kBlockM / 32; ++i)  // past L1: shared memory leaves it no room
                a_value[ahead][i] = __ldcg(operands.a_scales + a_scale[i] + kb * operands.scale_stride_k);
#pragma unroll
            for (int part = 0; part < kScaleParts; ++part) b_value[ahead][part] = __ldg(b_scale + part * b_stride + kb);
        };
#pragma unroll
        for (int ahead = 0; ahead < kScalesAhead; ++ahead)
            if (next + ahead * kScaleWarps < k_blocks) load(ahead, next + ahead * kScaleWarps);
        while (next < k_blocks) {
#pragma unroll
            for (int ahead = 0; ahead < kScalesAhead && next < k_blocks; ++ahead) {
                ptx::mbarrier_wait(&shared.empty[stage_ring.index], stage_ring.phase ^ 1);
#pragma unroll
                for (int part = 0; part < kScaleParts; ++part)
#pragma unroll
                    for (int i = 0; i < kBlockM / 32; ++i)
                        shared.scales[stage_ring.index][part][i * 32 + lane] = a_value[ahead][i] * b_value[ahead][part];
                publish(&shared.full[stage_ring.index]);
                if (next + kScalesAhead * kScaleWarps < k_blocks) load(ahead, next + kScalesAhead * kScaleWarps);
                next += kScaleWarps;
                stage_ring.advance(kScaleWarps);
            }
        }
        next -= k_blocks;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    grouped_gemm(const __grid_constant__ ptx::TensorMap a_map,  // [rows, k], box kBoxM x 128, 128-byte swizzle
                 const __grid_constant__ ptx::TensorMap b_map,  // [num_groups * rows of b, k], box kOutBlockN x 128
                 const float* a_scales, u32 scale_stride_group, u32 scale_stride_m, u32 scale_stride_k,
                 const float* __restrict__ b_scales,  // [num_groups, ceil(rows of b / 128), k / 128]
                 const int* group_extents,            // offsets [num_groups + 1] or counts [num_groups]
                 int num_groups, int n, int k,
                 int max_rows,                    // M, or max_m; group_extents beyond it are clamped
                 int rows_per_group,              // max_m, or 0 in the contiguous layout
                 int tile_steps, int tall_first,  // how groups are cut into tiles, see Cut
                 int first_column, int columns,   // to compute, see Columns
                 int extents_ready,  // complete before the preceding launch began: read without waiting for it
                 TileEpilogue::Element* __restrict__ out,  // [rows, n]
#if SWIGLU
                 float* __restrict__ out_scales, u32 out_scale_stride,  // [n / 128, out_scale_stride]
                 float alpha, float limit,                              // of the activation
#if OTHER_GLU
                 const u16* bias, float up_offset, int clamp_after,  // see GluRule
#endif
#elif !SWAP_AB
                 const __grid_constant__ ptx::TensorMap out_map,  // [rows, n], box 16 x 64, 128-byte swizzle
#endif
                 int* tile_counter) {  // [2]: tiles taken beyond each cluster's first, clusters done; both 0
#if SWIGLU
#if OTHER_GLU
    const GluRule rule{bias, up_offset, clamp_after != 0};
    const TileEpilogue::Output output{out, out_scales, out_scale_stride, alpha, limit, rule};
#else
    const TileEpilogue::Output output{out, out_scales, out_scale_stride, alpha, limit};
#endif
#elif SWAP_AB
    const TileEpilogue::Output output{out};
#else
    const TileEpilogue::Output output{out, &out_map};
#endif
    extern __shared__ __align__(1024) u8 raw[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw);
    int* const table = reinterpret_cast<int*>(raw + sizeof(SharedStorage));
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // so the compiler knows that it is uniform
    const int lane = threadIdx.x % 32;

    // ---- barriers
    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&a_map);
        ptx::prefetch_tensor_map(&b_map);
        output.prefetch();
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::mbarrier_init(&shared.full[stage], 1 + kArrivals);  // the TMA warp's leader, a scale warp
            ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps * kArrivals * kCluster);
        }
        for (int i = 0; i < kTiles; ++i) ptx::mbarrier_init(&shared.announced[i], 1);
        shared.epilogue.init_barriers();
        ptx::fence_mbarrier_init();
    }
    const int rank = kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
    Scheduler scheduler(num_groups, max_rows, {first_column, columns}, {tile_steps, tall_first});
    Tile first{};
    if (warp == kConsumerWarps && rank == 0) {  // meanwhile
        if (!extents_ready) ptx::grid_dependency_wait();
        scheduler.read(group_extents, table);
        first = scheduler.tile(blockIdx.x / kCluster);
    }
    kCluster > 1 ? ptx::cluster_sync() : __syncthreads();

    // ---- roles
    const Problem problem{n, k / kBlockK, rows_per_group, rank};
    const Operands operands{a_map, b_map, a_scales, scale_stride_group, scale_stride_m, scale_stride_k, b_scales};
    if (warp >= kConsumerWarps) {
        if constexpr (kMovesRegisters) ptx::shrink_registers<kProducerRegisters>();
        if (warp == kConsumerWarps) {
            load_tiles(ptx::keep_address(shared), operands, problem, scheduler, first, tile_counter, lane);
        } else {
            ptx::grid_dependency_wait();
            load_scales(shared, operands, problem, warp - kConsumerWarps - 1, lane);
        }
    } else {
        if constexpr (kMovesRegisters) ptx::grow_registers<kConsumerRegisters>();
        TileEpilogue epilogue(shared.epilogue, output, problem);
        if constexpr (kSwapAb)
            swap_ab::Consumer(shared, warp / 4).run(epilogue, problem);
        else
            normal::Consumer(shared, warp / 4).run(epilogue, problem);
    }
    if constexpr (kCluster > 1) ptx::cluster_sync();  // a CTA must outlive the other's arrivals and copies into it
}
