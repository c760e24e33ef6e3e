// Where the rows of (token, slot) pairs go: sorted by group, pairs of one group in their order.
//
// One CTA. A warp has a stretch of the pairs and counts its groups; from the counts of all warps before it follows where
// its own begin. Groups beyond the last one have no rows: their pairs are told -1.
#include "ptx.cuh"

constexpr int kWarps = 32;

// The group's counter of this warp, raised by the pairs of the warp's 32 that are of the same group; where each goes.
__device__ __forceinline__ int take(int* counters, int group, bool there) {
    const u32 same = __match_any_sync(0xffffffff, there ? group : -1);
    const int lane = threadIdx.x % 32, before = __popc(same & ((1u << lane) - 1));
    const int first = there ? counters[group] : 0;
    __syncwarp();
    if (there && before == 0) counters[group] = first + __popc(same);
    __syncwarp();
    return first + before;
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
    sort_rows(const int* __restrict__ group_ids,  // [num_pairs]; num_groups and more: no group
              int num_pairs, int num_groups,
              int* __restrict__ rows,      // [num_pairs], the sorted row of each pair, -1 for none
              int* __restrict__ offsets) {  // [num_groups + 1]
    extern __shared__ int counters[];  // [kWarps][num_groups]
    __shared__ int sums[kWarps];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int* const own = counters + warp * num_groups;
    const int each = (num_pairs + kWarps * 32 - 1) / (kWarps * 32) * 32;
    const int begin = min(warp * each, num_pairs), end = min(begin + each, num_pairs);

    for (int i = thread; i < kWarps * num_groups; i += blockDim.x) counters[i] = 0;
    __syncthreads();
    for (int i = begin; i < end; i += 32) {
        const int pair = i + lane, group = pair < end ? group_ids[pair] : num_groups;
        take(own, group, static_cast<u32>(group) < static_cast<u32>(num_groups));
    }
    __syncthreads();

    // A thread has one group (there are 1024 at most): its rows in every warp, then those of the groups before it.
    int total = 0;
    if (thread < num_groups) {
        for (int w = 0; w < kWarps; ++w) {
            const int count = counters[w * num_groups + thread];
            counters[w * num_groups + thread] = total;
            total += count;
        }
    }
    int sum = total;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += below;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = sum - total;
    for (int w = 0; w < warp; ++w) before += sums[w];
    if (thread < num_groups) {
        offsets[thread] = before;
        if (thread == num_groups - 1) offsets[num_groups] = before + total;
        for (int w = 0; w < kWarps; ++w) counters[w * num_groups + thread] += before;
    }
    __syncthreads();

    for (int i = begin; i < end; i += 32) {
        const int pair = i + lane, group = pair < end ? group_ids[pair] : num_groups;
        const bool there = static_cast<u32>(group) < static_cast<u32>(num_groups);
        const int row = take(own, group, there);
        if (pair < end) rows[pair] = there ? row : -1;
    }
}
