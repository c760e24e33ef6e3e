// The stable permutation that sorts (token, slot) pairs by group: the permuted row of each pair, and the offsets of the
// groups.
//
// With few pairs, one CTA compares each pair with all others. With more, one CTA or a cluster sorts them: each warp
// counts the groups in its own stretch of pairs, and the counts of all earlier warps, in its CTA and in earlier CTAs,
// give its first row in each group. A pair whose id names no group gets row -1.
//
// With kRanks the pairs are those of all ranks: each sends its own to all others, and waits for theirs. Begins a call,
// see ranks.cuh.
//
// Loops are kept rolled: instruction fetch dominates, see route_tokens.cu.
#include "ranks.cuh"

constexpr int kWarps = 32;
constexpr int kAtOnce = 4;  // loads per lane in flight
constexpr int kChunk = kAtOnce * 32;
constexpr int kMaxCtas = 8;
constexpr int kFewPairs = FEW_PAIRS;
constexpr int kManyPairs = MANY_PAIRS;
constexpr bool kRanks = RANKS;

// What this rank sends to the others: its tokens' pairs.
struct OwnPairs {
    const int* topk_ids;  // [count]; others than experts name none
    const float* topk_weights;
    int count, first;  // `first`: of its pairs, among those of all ranks
};

// The groups of pairs: as they are given, or with kRanks as they arrive from all ranks.
struct GroupIds {
    const int* given;  // [num_pairs]
    const Ranks* ranks;
    const int* first_tokens;  // [kMaxRanks + 1]: rank r has those from first_tokens[r] on
    int top_k;
    u64 until;

    __device__ __forceinline__ Pair* pairs() const { return ranks->pairs(ranks->rank, ranks->calls); }

    __device__ __forceinline__ int load(int pair) const {
        if constexpr (!kRanks) return given[pair];
        return static_cast<int>(ptx::load_relaxed_system(reinterpret_cast<const u32*>(&pairs()[pair].group)));
    }

    // The group, which was `group` before.
    __device__ __forceinline__ int wait_for(int group, int pair) const {
        if (!kRanks || !Ranks::is_missing(static_cast<u32>(group))) return group;
        u32 source = 0;
        while (first_tokens[source + 1] * top_k <= pair) ++source;
        const u32* const place = reinterpret_cast<const u32*>(&pairs()[pair].group);
        return static_cast<int>(ranks->wait_for(static_cast<u32>(group), place, source, until));
    }

    // Has `wait_for` wait for the next call's group.
    __device__ __forceinline__ void clear(int pair) const {
        if constexpr (kRanks) pairs()[pair].group = static_cast<int>(kNothing);
    }

    // Sends own pairs to all ranks; called by the cluster's threads. `id` and `weight`: of `thread`'s first pair.
    __device__ __forceinline__ void send(const OwnPairs& own, const int* place_of, int num_experts, int thread,
                                         int threads, int id, u32 weight) const {
#pragma unroll 1
        for (int pair = thread; pair < own.count; pair += threads) {
            if (pair != thread) id = own.topk_ids[pair], weight = __float_as_uint(own.topk_weights[pair]);
            const int at = static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1;
            u32 to = ranks->rank;
#pragma unroll 1
            for (u32 i = 0; i < ranks->num_ranks; ++i) {  // other ranks first
                to = to + 1 == ranks->num_ranks ? 0 : to + 1;
                const u32 group = at >= 0 && static_cast<u32>(at) >> 16 == to ? at & 0xffff : kNoGroup;
                u64* const there = reinterpret_cast<u64*>(ranks->pairs(to, ranks->calls) + own.first + pair);
                ptx::store_relaxed_system(there, static_cast<u64>(weight) << 32 | group);
            }
        }
    }
};

// A chunk of pairs from i on: this lane's groups, -1 for none, and the lanes of the warp with the same group.
struct Chunk {
    int group[kAtOnce];
    u32 same_group[kAtOnce];

    __device__ __forceinline__ void load(const GroupIds& group_ids, int i, int end, int num_groups) {
        const int first = i + static_cast<int>(threadIdx.x % 32);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part)
            group[part] = first + part * 32 < end ? group_ids.load(first + part * 32) : -1;
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            if (first + part * 32 < end) group[part] = group_ids.wait_for(group[part], first + part * 32);
            if (static_cast<u32>(group[part]) >= static_cast<u32>(num_groups)) group[part] = -1;
        }
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) same_group[part] = lanes_with(group[part] < 0);
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

    // Adds the pairs of each group to the warp's counter for it; returns the row of this lane's pair.
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

// Few pairs: compares each pair with all others, and each offset with all pairs.
__device__ __forceinline__ void compare_all(const GroupIds& group_ids, int num_pairs, int num_groups,
                                            int* inverse_permutation, int* offsets, int* offsets_copy,
                                            int* tile_counters) {
    __shared__ __align__(16) u32 groups[kFewPairs];
    const int thread = threadIdx.x;
    const u32 none = static_cast<u32>(num_groups);
    if (thread < num_pairs) {
        groups[thread] = min(static_cast<u32>(group_ids.wait_for(group_ids.load(thread), thread)), none);
        group_ids.clear(thread);
    } else if (thread < kFewPairs) {
        groups[thread] = none;
    }
    if (thread < 4) tile_counters[thread] = 0;
    __syncthreads();
    const auto count = [&](u32 group, int pair) {  // pairs of lower groups, and earlier pairs of this one
        int before = 0;
#pragma unroll 4
        for (int i = 0; i < num_pairs; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(groups + i);
            before += four.x < group || (four.x == group && i + 0 < pair);
            before += four.y < group || (four.y == group && i + 1 < pair);
            before += four.z < group || (four.z == group && i + 2 < pair);
            before += four.w < group || (four.w == group && i + 3 < pair);
        }
        return before;
    };
#pragma unroll 1
    for (int group = thread; group <= num_groups; group += blockDim.x) {
        const int offset = count(group, 0);
        offsets[group] = offset;
        if (offsets_copy != nullptr) offsets_copy[group] = offset;
    }
    if (thread < num_pairs) inverse_permutation[thread] = groups[thread] < none ? count(groups[thread], thread) : -1;
}

// The parameters from topk_weights to first_tokens are read with kRanks only.
extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
    compute_permutation(const int* given_ids,  // [num_pairs]; 0 .. num_groups - 1, or no group. With kRanks: topk_ids
                        const float* topk_weights, int own_pairs, int first_pair,  // see OwnPairs
                        const int* __restrict__ places,  // [num_experts]: rank * 65536 + group of each expert
                        int num_experts, Ranks* ranks_in_memory,
                        const u32* consumed,                   // [kMaxRanks][kCounterStride], of this rank's memory
                        const int* __restrict__ first_tokens,  // [kMaxRanks + 1], see GroupIds
                        int num_pairs, int top_k, int num_groups,
                        int* __restrict__ inverse_permutation,  // [num_pairs], the permuted row of each pair, -1: none
                        int* __restrict__ offsets,              // [num_groups + 1]
                        int* __restrict__ offsets_copy,         // the same, for the host; null: not wanted
                        int* __restrict__ tile_counters         // [2, 2], zeroed for the two GEMMs that follow
    ) {
    extern __shared__ int words[];
    const int thread = threadIdx.x, ctas = static_cast<int>(ptx::cluster_size());
    const int rank = static_cast<int>(ptx::cluster_rank());
    GroupIds group_ids = {given_ids, nullptr, first_tokens, top_k, 0};
    int* counters = words;  // [kWarps][num_groups], then totals [num_groups] of this CTA
    if constexpr (kRanks) {
        __shared__ Ranks ranks;
        int* const place_of = words;  // a copy of places
        counters += num_experts;
        copy_ranks(ranks, ranks_in_memory);
        copy_words(place_of, places, num_experts);
        const u32 seen = thread < kMaxRanks ? ptx::load_acquire_system(consumed + thread * kCounterStride) : 0;
        ptx::grid_dependency_wait();
        const int first = rank * static_cast<int>(blockDim.x) + thread;
        const int id = first < own_pairs ? given_ids[first] : -1;
        const u32 weight = first < own_pairs ? __float_as_uint(topk_weights[first]) : 0;
        ptx::wait_for_async_copies();
        __syncthreads();
        group_ids.ranks = &ranks;
        group_ids.until = ranks.until();
        ranks.wait_for_consumed(seen, group_ids.until);
        const bool many = num_pairs > kManyPairs;
        if (!many) ptx::launch_dependents();  // may send tokens from now on
        group_ids.send({given_ids, topk_weights, own_pairs, first_pair}, place_of, num_experts, first,
                       ctas * static_cast<int>(blockDim.x), id, weight);
        if (many) ptx::launch_dependents();  // or these pairs would wait for the link behind tokens
    }
    if (num_pairs <= kFewPairs) {
        if constexpr (!kRanks) {
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
        }
        if (kRanks && thread == 0) ranks_in_memory->calls += 1;
        compare_all(group_ids, num_pairs, num_groups, inverse_permutation, offsets, offsets_copy, tile_counters);
        return;
    }
    __shared__ int sums[kWarps];
    int* const totals = counters + kWarps * num_groups;
    const int warp = thread / 32, lane = thread % 32;
    int* const own = counters + warp * num_groups;
    const int each = (num_pairs + ctas * kWarps * 32 - 1) / (ctas * kWarps * 32) * 32;  // pairs per warp
    const int begin = min((rank * kWarps + warp) * each, num_pairs), end = min(begin + each, num_pairs);
    const int warps = min(max((num_pairs - rank * kWarps * each + each - 1) / each, 0), kWarps);  // warps with pairs

#pragma unroll 1
    for (int i = thread; i < warps * num_groups; i += blockDim.x) counters[i] = 0;
    __syncthreads();
    if constexpr (!kRanks) {
        ptx::grid_dependency_wait();
        ptx::launch_dependents();
    }
    Chunk chunk;
#pragma unroll 1
    for (int i = begin; i < end; i += kChunk) {
        chunk.load(group_ids, i, end, num_groups);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part)
            if (i + part * 32 < end) chunk.take(own, part);
    }
    __syncthreads();

    // One thread per group (at most 1024): adds up the group's rows over the warps, then over the CTAs, then the rows
    // of all earlier groups.
    int here = 0, total = 0, earlier = 0;  // rows in this CTA, in all CTAs, in earlier CTAs
    if (thread < num_groups) {
#pragma unroll 4
        for (int w = 0; w < warps; ++w) {
            const int count = counters[w * num_groups + thread];
            counters[w * num_groups + thread] = here;
            here += count;
        }
        totals[thread] = here;
    }
    ptx::cluster_sync();
    if (kRanks && rank == 0 && thread == 0) ranks_in_memory->calls += 1;  // all CTAs have read it
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
    const int sum = ptx::warp_prefix_sum(total);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    if (rank == 0 && thread < 4) tile_counters[thread] = 0;
    if (thread < num_groups) {
        int before = sum - total;
#pragma unroll 1
        for (int w = 0; w < warp; ++w) before += sums[w];
        if (rank == 0) {
            offsets[thread] = before;
            if (thread == num_groups - 1) offsets[num_groups] = before + total;
            if (offsets_copy != nullptr) {
                offsets_copy[thread] = before;
                if (thread == num_groups - 1) offsets_copy[num_groups] = before + total;
            }
        }
#pragma unroll 4
        for (int w = 0; w < warps; ++w) counters[w * num_groups + thread] += before + earlier;
    }
    ptx::cluster_sync();  // every CTA has read the others' totals

#pragma unroll 1
    for (int i = begin; i < end; i += kChunk) {
        if (each > kChunk) chunk.load(group_ids, i, end, num_groups);  // a warp's only chunk is still loaded
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            const int pair = i + part * 32 + lane;
            if (i + part * 32 >= end) break;
            const int row = chunk.take(own, part);
            if (pair >= end) continue;
            inverse_permutation[pair] = chunk.group[part] >= 0 ? row : -1;
            group_ids.clear(pair);
        }
    }
}
