// map
#include "consumer_normal.cuh"
#include "consumer_swap_ab.cuh"
#include "producers.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    grouped_gemm(const __grid_constant__ Parameters parameters) {
    const Operands operands{parameters.a_map, parameters.b_map, parameters.scales};
    const Groups& given = parameters.groups;
    const int* const group_extents = given.extents;
    const int num_groups = given.num_groups, n = given.n, k = given.k, max_rows = given.max_rows,
              rows_per_group = given.rows_per_group;
    const Cut cut = given.cut;
    const Columns columns = given.columns;
    const int extents_ready = parameters.extents_ready;
    const Epilogue::Output output = parameters.output;
    int* const tile_counter = parameters.tile_counter;
    extern __shared__ __align__(1024) u8 raw[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw);
    int* const table = reinterpret_cast<int*>(raw + sizeof(SharedStorage));
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // so the compiler knows that it is uniform
    const int lane = threadIdx.x % 32;

    // ---- barriers
    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&parameters.a_map);
        ptx::prefetch_tensor_map(&parameters.b_map);
        if constexpr (kStoresBoxes) ptx::prefetch_tensor_map(&parameters.out_map);
        shared.init_barriers();
    }
    const int rank = kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
    Scheduler scheduler(num_groups, max_rows, columns, cut);
    Tile first{};
    if (warp == kConsumerWarps && rank == 0) {  // meanwhile
        if (!extents_ready) ptx::grid_dependency_wait();
        scheduler.read(group_extents, table);
        first = scheduler.tile(blockIdx.x / kCluster);
    }
    kCluster > 1 ? ptx::cluster_sync() : __syncthreads();

    // ---- roles
    const Problem problem{n, k / kBlockK, rows_per_group, rank};
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
        Epilogue epilogue{shared.epilogue, parameters.out_map, output, problem};
        if constexpr (kSwapAb)
            swap_ab::Consumer(shared, warp / 4).run(epilogue, problem);
        else
            normal::Consumer(shared, warp / 4).run(epilogue, problem);
    }
    if constexpr (kCluster > 1) ptx::cluster_sync();  // a CTA must outlive the other's arrivals and copies into it
}
