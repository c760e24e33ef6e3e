// Grouped FP8 GEMM for Hopper: out[rows of g] = a[rows of g] * b[g]^T with 1x128 scales on a and 128x128 on b.
//
// The operands are swapped on the tensor cores: 128 rows of weights are wgmma's M (64 a warpgroup) and the tokens its
// N, in steps of 16. A group of 20 rows costs 32 and one of 200 costs 208: no padding to 64 or 128 rows.
//
// One producer warpgroup (a warp for TMA, three for scales) feeds two consumer warpgroups through a ring of stages.
// A CTA is persistent and walks tiles of all groups; with CLUSTER 2 a pair of CTAs takes neighbouring columns of the
// same rows and each loads half of the tokens for both.
#include "ptx.cuh"
#include "scheduler.cuh"
#include "wgmma.cuh"

#if MASKED
constexpr Layout kLayout = Layout::kMasked;
#else
constexpr Layout kLayout = Layout::kContiguous;
#endif
constexpr int kBlockM = BLOCK_M;  // most rows of a in a tile
constexpr int kBlockN = 128;      // columns of out (rows of b) a CTA: one scale block
constexpr int kBlockK = 128;      // one scale of a; bytes of a swizzled row
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;
constexpr int kBoxM = BOX_M;  // rows of a that one TMA load brings

constexpr int kConsumerWarps = 8;
constexpr int kScaleWarps = 3;
constexpr int kThreads = 384;
constexpr u32 kStagingBytes = 16 * 128;  // 16 rows of 64 bf16
constexpr int kScaleBatch = kBlockM > 96 ? 2 : 4;  // K blocks whose scales are loaded together: 40 registers allow no more

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
    u8 staging[2][2][kStagingBytes];  // [warpgroup][buffer]: rows of out on their way to memory
    float scales[kStages][kBlockM];
    u64 full[kStages];
    u64 empty[kStages];
    TileRecord tiles[kStages + 1];
    int scratch[kThreads / 32];
    int groups[1];  // the scheduler's table, sized by the launch
};

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

using Scheduler = TileScheduler<kLayout, kBlockM, kBlockN * kCluster>;

// Writes a warpgroup's 64 columns of a tile, 16 rows at a time through a swizzled buffer; only the tile's own rows.
template <int kSlices>
__device__ __forceinline__ void store(const float (&sum)[kSlices * 8], u32 staging, u32 warpgroup, u16* out, int rows,
                                      int columns, int n) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int row_in = lane / 16 * 8 + lane % 8, chunk_in = warp * 2 + lane / 8 % 2;
    const int row_out = thread / 8, chunk_out = thread % 8;
    const u32 in = staging + row_in * 128 + ((chunk_in ^ (row_in % 8)) * 16);
    const u32 from = staging + row_out * 128 + ((chunk_out ^ (row_out % 8)) * 16);
    out += static_cast<i64>(row_out) * n + chunk_out * 8;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
        const float* s = sum + slice * 8;
        const u32 buffer = slice % 2 * kStagingBytes;  // the other one was read before the barrier just passed
        ptx::stmatrix_transposed(in + buffer, ptx::pack_bf16(s[0], s[1]), ptx::pack_bf16(s[2], s[3]),
                                 ptx::pack_bf16(s[4], s[5]), ptx::pack_bf16(s[6], s[7]));
        ptx::named_barrier<128>(1 + warpgroup);
        if (slice * 16 + row_out < rows && chunk_out * 8 < columns)
            *reinterpret_cast<uint4*>(out + static_cast<i64>(slice) * 16 * n) = ptx::load_shared(from + buffer);
    }
    ptx::named_barrier<128>(1 + warpgroup);
}

// One tile of up to 16 * kSlices rows on one warpgroup: all of K, then the epilogue. Each height has its own code, so
// that the accumulators of a short tile are few and its wgmma narrow.
template <int kSlices>
__device__ __forceinline__ void consume(SharedStorage& shared, Pipeline& pipeline, const TileRecord& tile, u32 warpgroup,
                                        u16* out, int n, int k_blocks) {
    constexpr u64 kStep = 32 >> 4;  // 32 bytes of K a wgmma, in descriptor units
    const int lane = threadIdx.x % 32;
    float sum[kSlices * 8] = {};
#pragma unroll 1  // unrolled, the accumulators of two K blocks would be alive at once
    for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
        const int stage = pipeline.stage;
        float acc[kSlices * 8];
        ptx::mbarrier_wait(&shared.full[stage], pipeline.phase);
        const u64 weights = wgmma::descriptor(shared.weights[stage] + warpgroup * 64 * kBlockK);
        const u64 tokens = wgmma::descriptor(shared.tokens[stage]);
        ptx::wgmma_fence();
        wgmma::Multiply<16 * kSlices>::start(acc, weights, tokens);
#pragma unroll
        for (int step = 1; step < kBlockK / 32; ++step)
            wgmma::Multiply<16 * kSlices>::add(acc, weights + step * kStep, tokens + step * kStep);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kSlices * 8; ++i) asm volatile("" : "+f"(acc[i])::"memory");

        // Promotion: the tensor cores keep about 14 bits, so every 128 of K is added up in fp32. A column of the
        // fragment is a row of a; its scale comes already multiplied by the weights'.
        const float* scales = shared.scales[stage] + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kSlices * 8; i += 4) {
            const float2 scale = *reinterpret_cast<const float2*>(scales + i * 2);
            sum[i + 0] += acc[i + 0] * scale.x;
            sum[i + 1] += acc[i + 1] * scale.y;
            sum[i + 2] += acc[i + 2] * scale.x;
            sum[i + 3] += acc[i + 3] * scale.y;
        }
        __syncwarp();
        if (lane < kCluster) ptx::mbarrier_arrive_at<kCluster>(&shared.empty[stage], lane);
    }
    store<kSlices>(sum, ptx::shared_address(shared.staging[warpgroup]), warpgroup, out + tile.offset + warpgroup * 64,
                   tile.rows, tile.columns - warpgroup * 64, n);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_fp8(const __grid_constant__ ptx::TensorMap a_map,  // [rows, k], box kBoxM x 128, 128-byte swizzle
                     const __grid_constant__ ptx::TensorMap b_map,  // [num_groups * n, k], box 128 x 128
                     const float* __restrict__ a_scales, u32 scale_stride_group, u32 scale_stride_m, u32 scale_stride_k,
                     const float* __restrict__ b_scales,  // [num_groups, ceil(n / 128), k / 128]
                     const int* __restrict__ extents,     // offsets [num_groups + 1] or counts [num_groups]
                     u16* __restrict__ out,               // bf16 [rows, n]
                     int num_groups, int n, int k, int limit,  // limit: M, or max_m
                     int rows_per_group) {                     // max_m, or 0 where rows are not laid out by group
    extern __shared__ u8 raw[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(raw);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&a_map);
        ptx::prefetch_tensor_map(&b_map);
        for (int stage = 0; stage < kStages; ++stage) {
            ptx::mbarrier_init(&shared.full[stage], 1 + kScaleWarps);
            ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps * kCluster);
        }
        ptx::fence_mbarrier_init();
    }
    Scheduler::build(shared.groups, extents, num_groups, n, limit, shared.scratch);
    kCluster > 1 ? ptx::cluster_sync() : __syncthreads();


    if (warp >= kConsumerWarps) {
        ptx::shrink_registers<40>();
        const int rank = kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
        const int k_blocks = k / kBlockK;
        Scheduler scheduler(shared.groups, num_groups, n, blockIdx.x / kCluster, gridDim.x / kCluster);
        Pipeline pipeline;
        Tile tile;
        if (warp == kConsumerWarps) {
            // ---- TMA: this CTA's weights, and its share of the tokens for the whole cluster
            int slot = 0;
            for (; scheduler.next(tile); slot = slot == kStages ? 0 : slot + 1) {
                const int boxes = (tile.rows + kBoxM - 1) / kBoxM;
                const int row = tile.group * rows_per_group + tile.row;
                const int column = tile.column + rank * kBlockN;
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    const int stage = pipeline.stage;
                    ptx::mbarrier_wait(&shared.empty[stage], pipeline.phase ^ 1);
                    if (ptx::elect_one()) {
                        u64* full = &shared.full[stage];
                        if (kb == 0) shared.tiles[slot] = {static_cast<i64>(row) * n + column, tile.rows, n - column};
                        ptx::mbarrier_arrive_expect_bytes(full, kBlockN * kBlockK + boxes * kBoxM * kBlockK);
                        ptx::tma_load(&b_map, full, shared.weights[stage], kb * kBlockK, tile.group * n + column);
                        for (int box = rank; box < boxes; box += kCluster) {
                            u8* to = shared.tokens[stage] + box * kBoxM * kBlockK;
                            ptx::tma_load_to_cluster<kCluster>(&a_map, full, to, kb * kBlockK, row + box * kBoxM);
                        }
                    }
                    __syncwarp();
                }
            }
            ptx::mbarrier_wait(&shared.empty[pipeline.stage], pipeline.phase ^ 1);
            if (ptx::elect_one()) {
                shared.tiles[slot] = {0, 0, 0};
                ptx::mbarrier_arrive(&shared.full[pipeline.stage]);
            }
        } else {
            // ---- scales: the product of both, so that a consumer multiplies once
            constexpr int kLanes = kScaleWarps * 32;
            constexpr int kPerLane = (kBlockM + kLanes - 1) / kLanes;
            const int first = threadIdx.x - (kConsumerWarps + 1) * 32;
            const int blocks_n = (n + kBlockN - 1) / kBlockN;
            while (scheduler.next(tile)) {
                const int block_n = min(tile.column / kBlockN + rank, blocks_n - 1);
                const float* b_scale = b_scales + (tile.group * blocks_n + block_n) * k_blocks;
                u32 a_scale[kPerLane];  // rows past the tile's end repeat its last one: nobody reads the result
#pragma unroll
                for (int i = 0; i < kPerLane; ++i) {
                    const int row = tile.row + min(first + i * kLanes, tile.rows - 1);
                    a_scale[i] = tile.group * scale_stride_group + row * scale_stride_m;
                }
                for (int kb = 0; kb < k_blocks; kb += kScaleBatch) {
                    float product[kScaleBatch][kPerLane];
#pragma unroll
                    for (int j = 0; j < kScaleBatch; ++j) {
                        const int block = min(kb + j, k_blocks - 1);
#pragma unroll
                        for (int i = 0; i < kPerLane; ++i)
                            product[j][i] = __ldg(b_scale + block) * __ldg(a_scales + (a_scale[i] + block * scale_stride_k));
                    }
#pragma unroll
                    for (int j = 0; j < kScaleBatch; ++j) {
                        if (kb + j >= k_blocks) break;
                        ptx::mbarrier_wait(&shared.empty[pipeline.stage], pipeline.phase ^ 1);
#pragma unroll
                        for (int i = 0; i < kPerLane; ++i) {
                            const int row = first + i * kLanes;
                            if (kBlockM % kLanes == 0 || row < kBlockM) shared.scales[pipeline.stage][row] = product[j][i];
                        }
                        __syncwarp();
                        if (lane == 0) ptx::mbarrier_arrive(&shared.full[pipeline.stage]);
                        pipeline.advance();
                    }
                }
            }
            ptx::mbarrier_wait(&shared.empty[pipeline.stage], pipeline.phase ^ 1);
            if (lane == 0) ptx::mbarrier_arrive(&shared.full[pipeline.stage]);
        }
    } else {
        // ---- consumers: 64 columns each
        ptx::grow_registers<232>();
        const u32 warpgroup = warp / 4;
        Pipeline pipeline;
        for (int slot = 0;; slot = slot == kStages ? 0 : slot + 1) {
            ptx::mbarrier_wait(&shared.full[pipeline.stage], pipeline.phase);
            const TileRecord& tile = shared.tiles[slot];
            if (tile.rows == 0) break;
            switch ((tile.rows + 15) / 16) {
#define HEIGHT(S)                                                                                                 \
    case S:                                                                                                       \
        if constexpr (S <= kBlockM / 16)                                                                          \
            consume<S>(shared, pipeline, tile, warpgroup, out, n, k / kBlockK);                                   \
        break;
                HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6)
                HEIGHT(7) HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12)
#undef HEIGHT
            }
        }
    }
    if constexpr (kCluster > 1) ptx::cluster_sync();  // a CTA must outlive the other's arrivals and copies into it
}
