// What sorts (token, slot) pairs by group, on one GPU and on several.
//
// Loops are kept rolled: instruction fetch dominates, see route_tokens.cu.
#pragma once

#include "ptx.cuh"

constexpr int kWarps = 32;  // of a CTA
constexpr int kThreads = kWarps * 32;

// A chunk of pairs from i on: this lane's groups, -1 for none, and the lanes of the warp with the same group.
template <int kAtOnce>
struct Chunk {
    int group[kAtOnce];
    u32 same_group[kAtOnce];

    __device__ __forceinline__ void load(const int* groups, int i, int end) {
        const int first = i + static_cast<int>(threadIdx.x % 32);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part)
            group[part] = first + part * 32 < end ? groups[first + part * 32] : -1;
    }

    // Others than 0 .. num_groups - 1 are none.
    __device__ __forceinline__ void match(int num_groups) {
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            if (static_cast<u32>(group[part]) >= static_cast<u32>(num_groups)) group[part] = -1;
            same_group[part] = lanes_with(group[part] < 0);
        }
#pragma unroll 1
        for (int bit = 1; bit < num_groups; bit *= 2) {  // __match_any_sync takes several times as long
#pragma unroll
            for (int part = 0; part < kAtOnce; ++part) same_group[part] &= lanes_with((group[part] & bit) != 0);
        }
    }

    // The lanes with the same value as this one.
    static __device__ __forceinline__ u32 lanes_with(bool value) {
        const u32 lanes = __ballot_sync(0xffffffff, value);
        return value ? lanes : ~lanes;
    }

    // Adds the pairs of each group to the warp's counter for it; returns what this lane's pair comes to.
    __device__ __forceinline__ int take(int* counters, int part) const {
        const int lane = threadIdx.x % 32, first = __ffs(static_cast<int>(same_group[part])) - 1;
        int count = 0;
        if (lane == first && group[part] >= 0) {
            count = counters[group[part]];
            counters[group[part]] = count + __popc(same_group[part]);
        }
        __syncwarp();
        return __shfl_sync(0xffffffff, count, first) + __popc(same_group[part] & ((1u << lane) - 1));
    }
};

// Replaces the warps' counters for a group by the sums of those of all lower warps; returns the sum of all. Called by
// one thread for each group.
__device__ __forceinline__ int add_up_warps(int* counters, int num_groups, int group, int warps) {
    int sum = 0;
#pragma unroll 1
    for (int first = 0; first < warps; first += 4) {
        int count[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) count[i] = first + i < warps ? counters[(first + i) * num_groups + group] : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (first + i < warps) counters[(first + i) * num_groups + group] = sum;
            sum += count[i];
        }
    }
    return sum;
}

// Sums of all threads' values.
struct Sum {
    int below, all;  // of lower threads, of all

    // Called by all threads of the CTA; between two calls all of them synchronize.
    static __device__ __forceinline__ Sum of(int value) {
        __shared__ int sums[kWarps];
        const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
        const int through = ptx::warp_prefix_sum(value);
        if (lane == 31) sums[warp] = through;
        __syncthreads();
        const int of_lane = sums[lane];
        const int below = through - value + __reduce_add_sync(0xffffffff, lane < warp ? of_lane : 0);
        return {below, __reduce_add_sync(0xffffffff, of_lane)};
    }
};

// The results, besides each pair's row.
struct Offsets {
    int* offsets;        // [num_groups + 1]
    int* copy;           // the same, for the host; null: not wanted
    int* tile_counters;  // [2, 2], zeroed for the two GEMMs that follow
    int num_groups;

    __device__ __forceinline__ void write(int group, int offset) const {
        offsets[group] = offset;
        if (copy != nullptr) copy[group] = offset;
    }
};

// Few pairs: compares each pair with all others, and each offset with all pairs. `group`: of the thread's pair.
template <int kFewPairs>
__device__ __forceinline__ void compare_all(u32 group, int num_pairs, int* inverse_permutation,
                                            const Offsets& offsets) {
    __shared__ __align__(16) u32 groups[kFewPairs];
    const int thread = threadIdx.x;
    const u32 none = static_cast<u32>(offsets.num_groups);
    group = thread < num_pairs ? min(group, none) : none;
    if (thread < kFewPairs) groups[thread] = group;
    if (thread < 4) offsets.tile_counters[thread] = 0;
    __syncthreads();
    const int num_offsets = offsets.num_groups + 1;
#pragma unroll 1
    for (int i = thread; i < num_offsets + num_pairs; i += static_cast<int>(blockDim.x)) {
        const int pair = i < num_offsets ? 0 : i - num_offsets;
        const u32 of = i < num_offsets ? static_cast<u32>(i) : groups[pair];
        int before = 0;  // pairs of lower groups, and earlier pairs of this one
#pragma unroll 2
        for (int other = 0; other < num_pairs; other += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(groups + other);
            before += four.x < of || (four.x == of && other + 0 < pair);
            before += four.y < of || (four.y == of && other + 1 < pair);
            before += four.z < of || (four.z == of && other + 2 < pair);
            before += four.w < of || (four.w == of && other + 3 < pair);
        }
        if (i < num_offsets)
            offsets.write(i, before);
        else
            inverse_permutation[pair] = of < none ? before : -1;
    }
}
