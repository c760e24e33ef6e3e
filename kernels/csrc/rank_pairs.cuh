// (token, slot) pairs on their way to the ranks that hold their experts.
#pragma once

#include "ranks.cuh"

// Writes kCount pairs of this lane to the memory of all ranks: `pair`, among those of all ranks, and each 32nd after
// it, if it is among the next `left` ones. `at`: their experts' places, -1: none.
template <int kCount>
__device__ __forceinline__ void send(const Ranks& ranks, i64 pair, int left, const int (&at)[kCount],
                                     const u32 (&sorted)[kCount], const float (&weights)[kCount]) {
    u32 to = ranks.rank;
#pragma unroll 1
    for (u32 i = 0; i < ranks.num_ranks; ++i) {  // other ranks first
        to = to + 1 == ranks.num_ranks ? 0 : to + 1;
        u64* const there = reinterpret_cast<u64*>(ranks.pairs(to, ranks.calls) + pair);
#pragma unroll
        for (int part = 0; part < kCount; ++part) {
            const u32 word = at[part] >= 0 && static_cast<u32>(at[part]) >> 16 == to ? sorted[part] : kNoGroup;
            if (part * 32 < left) ptx::store_relaxed_system(there + part * 32, Pair{word, weights[part]}.packed());
        }
    }
}

// The pairs of all ranks, as they arrive: kCount of them for this thread, `pair` and each `stride`-th from there on.
template <int kCount>
struct IncomingPairs {
    const Ranks& ranks;
    const int* firsts;  // [kMaxRanks + 1]: rank r has the tokens from firsts[r] on
    int top_k, num_pairs, stride;
    u64 until;
    Pair pairs[kCount];

    __device__ __forceinline__ u64* place(int pair) const {
        return reinterpret_cast<u64*>(ranks.pairs(ranks.rank, ranks.calls)) + pair;
    }
    __device__ __forceinline__ u32 source(int pair) const {
        u32 source = 0;
        while (firsts[source + 1] * top_k <= pair) ++source;
        return source;
    }

    __device__ __forceinline__ void load(int pair) {
#pragma unroll
        for (int part = 0; part < kCount; ++part)
            if (pair + part * stride < num_pairs)
                pairs[part] = Pair::of(ptx::load_relaxed_system(place(pair + part * stride)));
    }

    // Waits for what was missing, and clears the places for the call after the next one. A weight is written again, as
    // combine_sums.cuh reads it: then this GPU has written it last.
    __device__ __forceinline__ void wait(int pair) {
        ranks.wait_while_missing(until, [&]() -> u32 {
            int missing = -1;
#pragma unroll
            for (int part = 0; part < kCount; ++part) {
                const int other = pair + part * stride;
                if (other >= num_pairs || !Ranks::is_missing(pairs[part].sorted)) continue;
                pairs[part] = Pair::of(ptx::load_relaxed_system(place(other)));
                missing = other;
            }
            return missing < 0 ? 0 : source(missing) + 1;
        });
#pragma unroll
        for (int part = 0; part < kCount; ++part)
            if (pair + part * stride < num_pairs)
                *place(pair + part * stride) = Pair{kNothing, pairs[part].weight}.packed();
    }
};
