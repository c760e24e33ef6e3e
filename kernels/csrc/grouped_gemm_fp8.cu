// Grouped FP8 GEMM for Hopper: out[rows of g] = a[rows of g] * b[g]^T with 1x128 scales on a and 128x128 on b.
//
// A CTA is persistent and walks tiles of all groups. One producer warpgroup (a warp for TMA, three for scales) feeds
// the consumer warpgroups through a ring of stages; with CLUSTER 2 a pair of CTAs takes neighbouring columns
// of the same rows, and each loads half of the tokens for both.
#include "activation.cuh"
#include "scheduler.cuh"
#include "storage.cuh"
#include "wgmma.cuh"
#if SWAPPED  // after the headers that both use: a header is put in place where it is first asked for
#include "consume_swapped.cuh"
#else
#include "consume_straight.cuh"
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_fp8(const __grid_constant__ ptx::TensorMap a_map,  // [rows, k], box kBoxM x 128, 128-byte swizzle
                     const __grid_constant__ ptx::TensorMap b_map,  // [num_groups * rows of b, k], box kBoxN x 128
#if !SWAPPED && !SWIGLU
                     const __grid_constant__ ptx::TensorMap out_map,  // [rows, n], box 16 x 64, 128-byte swizzle
#endif
                     const float* a_scales, u32 scale_stride_group, u32 scale_stride_m, u32 scale_stride_k,
                     const float* __restrict__ b_scales,  // [num_groups, ceil(rows of b / 128), k / 128]
                     const int* extents,                  // offsets [num_groups + 1] or counts [num_groups]
#if SWIGLU
                     u8* __restrict__ out,  // e4m3 [rows, n], from 2 n rows of b: gates, then ups
                     float* __restrict__ out_scales, u32 out_scale_stride,  // [n / 128, out_scale_stride]
                     float alpha, float activation_limit,
#else
                     u16* __restrict__ out,               // bf16 [rows, n]
#endif
                     int num_groups, int n, int k, int limit,  // limit: M, or max_m
                     int rows_per_group,  // max_m, or 0 where rows are not laid out by group
                     int tile_steps, int passes,  // how groups are cut into tiles: see Cut
                     int extents_are_older,  // than the launch before this one: they may be read before that is complete
                     int* claims) {  // [2]: tiles taken beyond everybody's first, clusters done; both 0
    extern __shared__ __align__(1024) u8 raw[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw);
    int* const table = reinterpret_cast<int*>(raw + sizeof(SharedStorage));
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // warp: known to be uniform

    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&a_map);
        ptx::prefetch_tensor_map(&b_map);
#if !SWAPPED && !SWIGLU
        ptx::prefetch_tensor_map(&out_map);
#endif
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::mbarrier_init(&shared.full[stage], 1 + kArrivals);  // the TMA warp's leader, a scale warp
            ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps * kArrivals * kCluster);
        }
        for (int i = 0; i < kTiles; ++i) ptx::mbarrier_init(&shared.announced[i], 1);
#if SWIGLU
        for (int i = 0; i < 2 * kConsumerWarps; ++i) ptx::mbarrier_init(&shared.largest.there[0][i], 1);
#endif
        ptx::fence_mbarrier_init();
    }
    kCluster > 1 ? ptx::cluster_sync() : __syncthreads();

    const int rank = kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
    const int k_blocks = k / kBlockK;
    if (warp >= kConsumerWarps) {
        ptx::shrink_registers<40>();
        if (warp == kConsumerWarps) {
            // ---- TMA: this CTA's weights, and its share of the tokens for the whole cluster
            if (!extents_are_older) ptx::wait_for_launches_before();
            const Scheduler scheduler(table, extents, num_groups, n, {tile_steps, passes}, limit);
            const auto load_weights = [&](const Tile& tile, int kb, int stage) {
                const int column = tile.group * n * kScaleParts + tile.column;
                const int boxes = (tile.rows + kBoxM - 1) / kBoxM;
                ptx::mbarrier_arrive_expect_bytes(&shared.full[stage], (kWeightRows + boxes * kBoxM) * kBlockK);
#pragma unroll
                for (int part = 0; part < kScaleParts; ++part)  // gates, and their ups n rows on
                    ptx::tma_load(&b_map, &shared.full[stage], shared.weights[stage] + part * kBoxN * kBlockK, kb * kBlockK,
                                  column + part * n);
            };
            int ahead = -1;  // K blocks of the first tile whose weights are on their way already
            Pipeline pipeline;
            Walk walk;
            // Everybody's first tile is its own number; for later ones the first cluster that is nearly done comes first.
            for (int number = blockIdx.x / kCluster;; walk.advance()) {
                const Tile tile = part_of(announce(shared, walk, rank, [&] { return scheduler.tile(number); }), rank);
                if (tile.rows < 0) break;
                const int boxes = (tile.rows + kBoxM - 1) / kBoxM;
                const int row = tile.group * rows_per_group + tile.row;
                int claimed = 0;
                if (ahead < 0) {  // weights do not depend on the launch before
                    for (ahead = 0; ahead < min(kStages, k_blocks); ++ahead)
                        if (ptx::elect_one()) load_weights(tile, ahead, ahead);
                    __syncwarp();
                    ptx::wait_for_launches_before();
                    ptx::let_next_launch_begin();
                }
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    const int stage = pipeline.index;
                    // Early enough to be back in time, late enough for the order to be that of finishing.
                    if (kb == max(k_blocks - kClaimAhead, 0) && rank == 0 && lane == 0) claimed = atomicAdd(claims, 1);
                    ptx::mbarrier_wait(&shared.empty[stage], pipeline.phase ^ 1);
                    if (ptx::elect_one()) {
                        if (kb >= ahead) load_weights(tile, kb, stage);
                        for (int box = rank; box < boxes; box += kCluster) {
                            ptx::tma_load_to_cluster<kCluster>(&a_map, &shared.full[stage], shared.tokens[stage] + box * kBoxM * kBlockK,
                                                               kb * kBlockK, row + box * kBoxM);
                        }
                    }
                    __syncwarp();
                }
                ahead = 0;
                number = gridDim.x / kCluster + __shfl_sync(0xffffffff, claimed, 0);
            }
            ptx::wait_for_launches_before();  // also where there was no tile
            if (rank == 0 && lane == 0) leave(claims, gridDim.x / kCluster);
        } else if (warp > kConsumerWarps) {
            // ---- scales: the product of both, so that a consumer multiplies once. The warps take stages in turn and
            // load before their stage is free: consumers wait for a stage's slowest load, and these come a long way.
            ptx::wait_for_launches_before();
            const int blocks_n = (n + 127) / 128;  // of gates, where there are ups too
            int next = warp - kConsumerWarps - 1;  // this warp's next K block, counted from the tile's first
            Pipeline pipeline;
            pipeline.advance(next);
            for (Walk walk;; walk.advance()) {
                ptx::mbarrier_wait(&shared.announced[walk.index], walk.phase);
                const Tile tile = part_of(shared.tiles[walk.index], rank);
                if (tile.rows < 0) break;
                const int block_n = min(tile.column / 128, blocks_n - 1);
                const float* b_scale = b_scales + (static_cast<i64>(tile.group) * blocks_n * kScaleParts + block_n) * k_blocks;
                const int last = tile.row + tile.rows - 1;
                u32 a_scale[kBlockM / 32];  // rows past the tile's end repeat its last one: nobody reads the result
#pragma unroll
                for (int i = 0; i < kBlockM / 32; ++i)
                    a_scale[i] = tile.group * scale_stride_group + min(tile.row + i * 32 + lane, last) * scale_stride_m;
                for (; next < k_blocks; next += kScaleWarps, pipeline.advance(kScaleWarps)) {
                    float a_value[kBlockM / 32];
#pragma unroll
                    for (int i = 0; i < kBlockM / 32; ++i) a_value[i] = a_scales[a_scale[i] + next * scale_stride_k];
                    float b_value[kScaleParts];
#pragma unroll
                    for (int part = 0; part < kScaleParts; ++part)
                        b_value[part] = __ldg(b_scale + part * blocks_n * k_blocks + next);
                    ptx::mbarrier_wait(&shared.empty[pipeline.index], pipeline.phase ^ 1);
#pragma unroll
                    for (int part = 0; part < kScaleParts; ++part)
#pragma unroll
                        for (int i = 0; i < kBlockM / 32; ++i)
                            shared.scales[pipeline.index][part][i * 32 + lane] = a_value[i] * b_value[part];
                    publish(&shared.full[pipeline.index]);
                }
                next -= k_blocks;
            }
        }
    } else {
        // ---- consumers
        ptx::grow_registers<kConsumerGroups == 2 ? 232 : 152>();
#if SWIGLU
        const Output output{out, out_scales, out_scale_stride, alpha, activation_limit, n, rows_per_group, rank};
#elif SWAPPED
        const Output output{out, nullptr, n, rows_per_group, rank};
#else
        const Output output{out, &out_map, n, rows_per_group, rank};
#endif
#if SWAPPED
        swapped::consume_all(shared, warp / 4, output, k_blocks);
#else
        straight::Consumer(shared, warp / 4).run(output, k_blocks);
#endif
    }
    if constexpr (kCluster > 1) ptx::cluster_sync();  // a CTA must outlive the other's arrivals and copies into it
}
