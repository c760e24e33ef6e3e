// The stable permutation that sorts (token, slot) pairs by group: the permuted row of each pair, and the offsets of the
// groups.
//
// With few pairs, one CTA compares each pair with all others. With more, one CTA or a cluster sorts them: each warp
// counts the groups in its own segment of pairs, and the counts of all earlier warps, in its CTA and in earlier CTAs,
// give its first row in each group. A pair whose id names no group gets row -1.
#include "permutation.cuh"

constexpr int kMaxCtas = 8;
constexpr int kAtOnce = 4;  // pairs of a lane
constexpr int kChunk = kAtOnce * 32;
constexpr int kFewPairs = FEW_PAIRS;
constexpr bool kLooksUp = LOOKS_UP;  // ids are others than groups

// The groups of ids, which may be in memory or not; see GroupTable in ops/parts.py.
struct Table {
    const int* groups;  // [num_ids]
    int num_ids;
    int* seen;  // [1 + num_pairs], of the host

    __device__ __forceinline__ bool lacks(int id, int group) const {
        return group < 0 && static_cast<u32>(id) < static_cast<u32>(num_ids);
    }

    __device__ __forceinline__ int find(int id, int pair) const {
        seen[1 + pair] = id;
        return static_cast<u32>(id) < static_cast<u32>(num_ids) ? groups[id] : -1;
    }

    __device__ __forceinline__ void find(Chunk<kAtOnce>& chunk, int i, int end) const {
        const int first = i + static_cast<int>(threadIdx.x % 32);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            const int id = chunk.group[part];
            if (first + part * 32 < end) chunk.group[part] = find(id, first + part * 32);
            if (lacks(id, chunk.group[part])) seen[0] = 1;
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    compute_permutation(const int* group_ids,  // [num_pairs]; 0 .. num_groups - 1, or no group
                        int num_pairs, int num_groups,
                        int* __restrict__ inverse_permutation,  // [num_pairs], the permuted row of each pair, -1: none
                        int* __restrict__ offsets, int* __restrict__ offsets_copy,    // see Offsets
                        int* __restrict__ tile_counters,                              // likewise
                        const int* table_groups, int num_ids, int* __restrict__ seen  // see Table; not read else
    ) {
    extern __shared__ int counters[];  // [kWarps][num_groups], then totals [num_groups] of this CTA
    const int thread = threadIdx.x, ctas = static_cast<int>(ptx::cluster_size());
    const int rank = static_cast<int>(ptx::cluster_rank());
    const Offsets results = {offsets, offsets_copy, tile_counters, num_groups};
    const Table table = {table_groups, num_ids, seen};
    if (num_pairs <= kFewPairs) {
        ptx::grid_dependency_wait();
        ptx::launch_dependents();
        int group = thread < num_pairs ? group_ids[thread] : -1;
        if constexpr (kLooksUp) {
            const int id = group;
            if (thread < num_pairs) group = table.find(id, thread);
            const bool lacks = table.lacks(id, group);
            if (lacks) seen[0] = 1;
            if (__syncthreads_or(lacks)) group = -1;  // the call has to be repeated: make it short
        }
        compare_all<kFewPairs>(static_cast<u32>(group), num_pairs, inverse_permutation, results);
        return;
    }
    int* const totals = counters + kWarps * num_groups;
    const int warp = thread / 32, lane = thread % 32;
    int* const own = counters + warp * num_groups;
    const int each = (num_pairs + ctas * kThreads - 1) / (ctas * kThreads) * 32;  // pairs per warp
    const int begin = min((rank * kWarps + warp) * each, num_pairs), end = min(begin + each, num_pairs);
    const int warps = min(max((num_pairs - rank * kWarps * each + each - 1) / each, 0), kWarps);  // warps with pairs

#pragma unroll 1
    for (int i = thread; i < warps * num_groups; i += kThreads) counters[i] = 0;
    __syncthreads();
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    Chunk<kAtOnce> chunk;
#pragma unroll 1
    for (int i = begin; i < end; i += kChunk) {
        chunk.load(group_ids, i, end);
        if constexpr (kLooksUp) table.find(chunk, i, end);
        chunk.match(num_groups);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part)
            if (i + part * 32 < end) chunk.take(own, part);
    }
    __syncthreads();

    // One thread per group (at most 1024): adds up the group's rows over the warps, then over the CTAs, then the rows
    // of all earlier groups.
    int total = 0, earlier = 0;  // rows in all CTAs, in earlier CTAs
    if (thread < num_groups) totals[thread] = add_up_warps(counters, num_groups, thread, warps);
    ptx::cluster_sync();
    if (thread < num_groups) {
        int count[kMaxCtas];
#pragma unroll
        for (int r = 0; r < kMaxCtas; ++r) count[r] = r < ctas ? ptx::load_from_cta(totals + thread, r) : 0;
#pragma unroll
        for (int r = 0; r < kMaxCtas; ++r) {
            if (r < rank) earlier += count[r];
            total += count[r];
        }
    }
    const int first_row = Sum::of(total).below;
    if (rank == 0) {
        if (thread < 4) tile_counters[thread] = 0;
        if (thread < num_groups) results.write(thread, first_row);
        if (thread == num_groups - 1) results.write(num_groups, first_row + total);
    }
    if (thread < num_groups) {
#pragma unroll 4
        for (int w = 0; w < warps; ++w) counters[w * num_groups + thread] += first_row + earlier;
    }
    ptx::cluster_sync();  // every CTA has read the others' totals

#pragma unroll 1
    for (int i = begin; i < end; i += kChunk) {
        if (each > kChunk) {  // else the warp's only chunk is still loaded
            chunk.load(group_ids, i, end);
            if constexpr (kLooksUp) table.find(chunk, i, end);
            chunk.match(num_groups);
        }
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            const int pair = i + part * 32 + lane;
            if (i + part * 32 >= end) break;
            const int row = chunk.take(own, part);
            if (pair < end) inverse_permutation[pair] = chunk.group[part] >= 0 ? row : -1;
        }
    }
}
