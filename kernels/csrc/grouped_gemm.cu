// Grouped FP8 GEMM for Hopper: out[rows of g] = a[rows of g] * b[g]^T with 1x128 scales on a and 128x128 on b.
//
// A CTA is persistent and takes tiles of all groups from a tile counter. Its warps have three roles. They hand each
// other tiles, and stages of a ring in shared memory: 128 columns of a and b (a K block) and the scales of the product.
// Each stage has two barriers: `full` once it is loaded, `empty` once it is read. With kCluster 2 a pair of CTAs takes
// neighboring columns of the same rows, and each CTA loads half of the rows of a for both.
//
//   role                  phases                                                   where
//   a TMA warp            announce a tile, load a and b, take the next tile        producers.cuh: load_tiles
//   three scale warps     locate a tile's scales, load and multiply them           producers.cuh: load_scales
//   1 to 3 warpgroups     multiply a K block, promote (scale and add it in fp32);  consume, below
//   of consumers          after the last one, store the tile: an epilogue
//
// For a plain GEMM read on in this order:
//
//   config.cuh            the variant: tile, stages, roles
//   parameters.cuh        what a launch passes
//   pipeline.cuh          the shared memory, the ring, how stages and tiles are handed over
//   producers.cuh         the producers' loops
//   consumer_normal.cuh   how a warpgroup multiplies and promotes its part of a tile
//   epilogue_bf16.cuh     how it stores it
//   scheduler.cuh         which rows and columns the tile with a number has
//
// To look up: wgmma.cuh, wgmma_instructions.cuh (K blocks on the tensor cores), ptx.cuh (one function for each PTX
// instruction), floats.cuh. The rest is for other GEMMs:
//
//   few rows: b on wgmma's M side                 consumer_swap_ab.cuh, epilogue_swap_ab.cuh
//   the first GEMM of a layer                     epilogue_glu.cuh, activation_swiglu.cuh, activation_other_glu.cuh
//   b in codes of four bits, on the M side, too   codes.cuh, wgmma_fragments.cuh, consumer_codes.cuh,
//                                                 epilogue_swap_ab_glu.cuh
#include "consumer_codes.cuh"
#include "consumer_normal.cuh"
#include "consumer_swap_ab.cuh"
#include "producers.cuh"

// A consumer warpgroup's loop over all tiles. A Consumer `computes` a tile that has rows and columns for it: it
// multiplies and promotes all of K, then calls the epilogue.
template <typename Consumer>
__device__ __forceinline__ void consume(const Problem& problem, SharedStorage& shared, Consumer&& consumer,
                                        Epilogue& epilogue) {
    StageRing stage_ring;
    for (TileRing tile_ring;; tile_ring.advance()) {
        // -- wait for a tile
        const Tile tile = shared.announced_tile(tile_ring, problem);
        if (tile.rows < 0) break;

        // -- nothing to compute here: only release the stages
        if constexpr (kMaySkip) {
            if (!consumer.computes(tile, problem)) {
                for (int left = problem.k_blocks; left > 0; --left, stage_ring.advance()) {
                    shared.wait_full(stage_ring);
                    shared.release(stage_ring.index);
                }
                continue;
            }
        }

        // -- multiply and promote all of K, and store
        epilogue.prepare(tile);
        consumer.compute(epilogue, stage_ring, tile, problem.k_blocks);
    }
    epilogue.finish();
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    grouped_gemm(const __grid_constant__ Parameters parameters) {
    // ---- parameters of loops: read here, once; the compiler would read them again each time
    const Operands operands{parameters.a_map, parameters.b_map, reinterpret_cast<const u8*>(parameters.b_map.opaque[0]),
                            parameters.scales, parameters.tile_counter};
    const Groups& given = parameters.groups;
    const int* const group_extents = given.extents;
    const int num_groups = given.num_groups, n = given.n, k = given.k, max_rows = given.max_rows,
              rows_per_group = given.rows_per_group;
    const Cut cut = given.cut;
    const Columns columns = given.columns;
    const Epilogue::Output output = parameters.output;

    // ---- shared memory
    extern __shared__ __align__(1024) u8 raw[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // so the compiler knows that it is uniform
    const int lane = threadIdx.x % 32;

    // ---- barriers, and meanwhile the cluster's first tile
    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&parameters.a_map);
        if constexpr (!kFourBits) ptx::prefetch_tensor_map(&parameters.b_map);
        if constexpr (kStoresBoxes) ptx::prefetch_tensor_map(&parameters.out_map);
        shared.init_barriers();
    }
    const int rank = kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
    Scheduler scheduler(num_groups, max_rows, columns, cut);
    Tile first{};
    if (warp == kConsumerWarps && rank == 0) {
        if (!parameters.extents_ready) ptx::grid_dependency_wait();
        scheduler.read(group_extents, reinterpret_cast<int*>(&shared + 1));
        first = scheduler.tile(blockIdx.x / kCluster);
    }
    kCluster > 1 ? ptx::cluster_sync() : __syncthreads();

    // ---- roles
    const Problem problem{n, k / kBlockK, rows_per_group, rank};
    if (warp >= kConsumerWarps) {
        if constexpr (kMovesRegisters) ptx::shrink_registers<kProducerRegisters>();
        if (warp == kConsumerWarps) {
            load_tiles(ptx::keep_address(shared), operands, problem, scheduler, first, lane);
        } else {
            ptx::grid_dependency_wait();
            load_scales(shared, operands, problem, warp - kConsumerWarps - 1, lane);
        }
    } else {
        if constexpr (kMovesRegisters) ptx::grow_registers<kConsumerRegisters>();
        Epilogue epilogue{shared.epilogue, parameters.out_map, output, problem};
        if constexpr (kFourBits)
            consume(problem, shared, codes::Consumer(shared, warp / 4, problem, operands.scales.b), epilogue);
        else if constexpr (kSwapAb)
            consume(problem, shared, swap_ab::Consumer(shared, warp / 4), epilogue);
        else
            consume(problem, shared, normal::Consumer(shared, warp / 4), epilogue);
    }
    if constexpr (kCluster > 1) ptx::cluster_sync();  // a CTA must outlive the other's arrivals and copies into it
}
