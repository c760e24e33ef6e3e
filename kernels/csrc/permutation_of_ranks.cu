// As compute_permutation.cu, for the pairs of all ranks. Begins a call, see ranks.cuh.
//
// Each rank sorts its own pairs alone, by all experts: a CTA of its cluster has a segment of them. It sends each pair
// with the number of pairs before it in its segment that have the same expert, and how many of the segment have each.
// From the counts of all segments a rank knows where each segment begins within each of its groups. So no rank sorts
// the others' pairs, and what is sent is ready before anything has arrived.
//
// Few pairs are left to few_pairs_of_ranks.cu.
#include "permutation.cuh"
#include "rank_pairs.cuh"

constexpr int kAtOnce = AT_ONCE;  // pairs of a lane
constexpr int kChunk = kAtOnce * 32;
constexpr bool kSingle = kAtOnce == 1;  // each warp has one chunk at most, and each thread one pair to receive
constexpr int kManyPairs = MANY_PAIRS;
static_assert(SEGMENTS == kMaxSegments);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    permutation_of_ranks(const int* topk_ids,                  // [own_pairs] of this rank; ids out of range are ignored
                         const float* topk_weights,            // [own_pairs]
                         int own_pairs, int first_pair,        // its index among the pairs of all ranks
                         int pairs_of_cta, int pairs_of_warp,  // of own ones, at most; a multiple of kChunk for a warp
                         const int* __restrict__ places,       // [num_experts]: rank * 65536 + group of each expert
                         int num_experts, Ranks* ranks_in_memory,
                         const u32* consumed,  // [kMaxRanks][kCounterStride], of this rank's memory
                         RANK_TOKENS,
                         int segment_bits,  // each rank has 2^segment_bits segments, at least 4; as many CTAs, or one
                         int all_segment_bits,  // all ranks together have 2^all_segment_bits at most
                         int num_pairs, int top_k, int num_groups,
                         int* __restrict__ inverse_permutation,  // [num_pairs], the permuted row of each pair, -1: none
                         int* __restrict__ offsets, int* __restrict__ offsets_copy,  // see Offsets
                         int* __restrict__ tile_counters                             // likewise
    ) {
    extern __shared__ __align__(16) int memory[];
    __shared__ Ranks ranks;
    __shared__ int firsts[kMaxRanks + 1];
    int* const counters = memory;                                       // [kWarps][num_experts]
    int* const first_rows = counters + kWarps * num_experts;            // [num_groups][2^all_segment_bits]
    int* const exists = first_rows + (num_groups << all_segment_bits);  // [num_groups]: an expert has this place
    int* const place_of = exists + num_groups;                          // [num_experts], a copy of places
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int ctas = static_cast<int>(ptx::cluster_size()), cta = static_cast<int>(ptx::cluster_rank());
    const bool many = num_pairs > kManyPairs;
    const Offsets results = {offsets, offsets_copy, tile_counters, num_groups};

    copy_ranks(ranks, ranks_in_memory);
    copy_words(place_of, places, num_experts);
    if (threadIdx.x == 0) write_firsts(firsts, tokens_0, tokens_3, tokens_6);
    const u32 seen = thread < kMaxRanks ? ptx::load_acquire_system(consumed + thread * kCounterStride) : 0;
    const auto place = [&](int id) { return static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1; };
    ptx::grid_dependency_wait();

    // This CTA's segment, and each warp's part of it.
    const int begin_of_cta = min(cta * pairs_of_cta, own_pairs),
              end_of_cta = min(begin_of_cta + pairs_of_cta, own_pairs);
    const int begin = min(begin_of_cta + warp * pairs_of_warp, end_of_cta),
              end = min(begin + pairs_of_warp, end_of_cta);
    const int warps = min((pairs_of_cta + pairs_of_warp - 1) / pairs_of_warp, kWarps);
    Chunk<kAtOnce> chunk;
    float weights[kAtOnce];
    const auto load = [&](int i) {
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            const int pair = i + part * 32 + lane;
            weights[part] = pair < end ? topk_weights[pair] : 0.0f;
        }
        chunk.load(topk_ids, i, end);
    };
    load(begin);
#pragma unroll 1
    for (int i = thread; i < warps * num_experts; i += kThreads) counters[i] = 0;
#pragma unroll 1
    for (int i = thread; i < num_groups; i += kThreads) exists[i] = 0;
    ptx::wait_for_async_copies();
    __syncthreads();
    const u64 until = ranks.until();
    ranks.wait_for_consumed(seen, until);
    if (!many) ptx::launch_dependents();  // may send tokens from now on
    int* const own = counters + warp * num_experts;
    // Counts the warp's pairs by expert, then those of all lower warps.
    u32 index = 0;  // with kSingle: pairs of the warp before this lane's one
#pragma unroll 1
    for (int i = begin; i < end; i += kChunk) {
        if (i > begin) load(i);
        chunk.match(num_experts);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part)
            if (i + part * 32 < end) index = chunk.take(own, part);
        if (kSingle) break;
    }
    __syncthreads();
    const int at = place(thread);  // of expert `thread`
    const int count = at >= 0 ? add_up_warps(counters, num_experts, thread, warps) : 0;
    if (at >= 0 && static_cast<u32>(at) >> 16 == ranks.rank && (at & 0xffff) < num_groups) exists[at & 0xffff] = 1;
    __syncthreads();

    // Sends the counts, then the pairs.
    if (at >= 0) {
        u32* const there = ranks.counts(static_cast<u32>(at) >> 16, at & 0xffff) + (ranks.rank << segment_bits);
        if (ctas == 1) {  // one store for four segments
#pragma unroll 1
            for (int s = 0; s < 1 << segment_bits; s += 4) {
                const u32 first = s == 0 ? static_cast<u32>(count) : 0;
                ptx::store_relaxed_system(reinterpret_cast<uint4*>(there + s), uint4{first, 0, 0, 0});
            }
        } else {
            ptx::store_relaxed_system(there + cta, count);
        }
    }
#pragma unroll 1
    for (int i = begin; i < end; i += kChunk) {
        if (!kSingle && pairs_of_warp > kChunk) {  // else the warp's only chunk is still loaded
            load(i);
            chunk.match(num_experts);
        }
        int where[kAtOnce];
        u32 sorted[kAtOnce];
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            where[part] = place(chunk.group[part]);
            if (kSingle)
                index += where[part] >= 0 ? own[chunk.group[part]] : 0;
            else if (i + part * 32 < end)
                index = chunk.take(own, part);
            sorted[part] =
                PairDestination{static_cast<u32>(where[part]) & 0xffff, static_cast<u32>(cta), index}.packed();
        }
        send<kAtOnce>(ranks, first_pair + i + lane, end - i - lane, where, sorted, weights);
        if (kSingle) break;
    }
    if (many) ptx::launch_dependents();  // or these pairs would wait for the link behind tokens

    // The first row of each segment in each group: the sum of all counts before. A thread has four segments of a rank
    // at a time. After a rank was late, counts may be those of another call: no row may be outside.
    const int num_counts = num_groups << all_segment_bits;
    const int all_segments = static_cast<int>(ranks.num_ranks) << segment_bits;
    const auto segment_of = [&](int i) { return i & ((1 << all_segment_bits) - 1); };
    const auto counts_at = [&](int i) {
        return reinterpret_cast<uint4*>(ranks.counts(ranks.rank, i >> all_segment_bits) + segment_of(i));
    };
    const auto begin_to_count = [&](int i) {
        const bool come = i < num_counts && segment_of(i) < all_segments && exists[i >> all_segment_bits];
        return come ? ptx::load_relaxed_system(counts_at(i)) : uint4{0, 0, 0, 0};
    };
    const auto inside = [&](u32 row) { return static_cast<int>(min(row, static_cast<u32>(num_pairs))); };
    const int stride = ctas * kThreads, first_of_thread = cta * kThreads + thread;
    IncomingPairs<kAtOnce> incoming = {ranks, firsts, top_k, num_pairs, stride, until, {}};
    int all = 0;  // rows of the counts before
    uint4 next = begin_to_count(4 * thread);
#pragma unroll 1
    for (int i = 4 * thread; i - 4 * thread < num_counts; i += 4 * kThreads) {
        uint4 now = next;
        next = begin_to_count(i + 4 * kThreads);
        if (Ranks::is_missing(now)) {
            now = ranks.wait_for(now, counts_at(i), segment_of(i) >> segment_bits, until);
            if (Ranks::is_missing(now)) now = {0, 0, 0, 0};
        }
        incoming.load(first_of_thread);  // is on its way meanwhile
        const Sum sum = Sum::of(static_cast<int>(now.x + now.y + now.z + now.w));
        const u32 x = all + sum.below, y = x + now.x, z = y + now.y, w = z + now.z;
        all += sum.all;
        if (i < num_counts) {
            *reinterpret_cast<uint4*>(first_rows + i) = {x, y, z, w};
            if (cta == 0 && segment_of(i) == 0) results.write(i >> all_segment_bits, inside(x));
        }
        __syncthreads();
    }
    ptx::cluster_arrive_relaxed();  // has read all counts, and `ranks`

#pragma unroll 1
    for (int first = first_of_thread; first < num_pairs; first += kAtOnce * stride) {
        if (first > first_of_thread) incoming.load(first);
        incoming.wait(first);
#pragma unroll
        for (int part = 0; part < kAtOnce; ++part) {
            const int pair = first + part * stride;
            if (pair >= num_pairs) break;
            const PairDestination sorted = PairDestination::of(incoming.pairs[part].sorted);
            const u32 segment = (incoming.source(pair) << segment_bits) + sorted.segment;
            const u32 i = (sorted.group << all_segment_bits) + segment;
            const bool is_here = incoming.pairs[part].sorted < kNoGroup && i < static_cast<u32>(num_counts);
            const u32 row = is_here ? first_rows[i] + sorted.index : num_pairs;
            inverse_permutation[pair] = row < static_cast<u32>(num_pairs) ? static_cast<int>(row) : -1;
        }
        if (kSingle) break;
    }
    if (cta == 0 && thread == 0) results.write(num_groups, inside(all));
    if (cta == 0 && thread < 4) tile_counters[thread] = 0;
    ptx::cluster_wait();
#pragma unroll 1
    for (int i = 4 * first_of_thread; i < num_counts; i += 4 * stride)
        *counts_at(i) = {kNothing, kNothing, kNothing, kNothing};
    if (cta == 0 && thread == 0) ranks_in_memory->calls = ranks.calls + 1;
}
