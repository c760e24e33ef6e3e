// Memory that all ranks of an expert-parallel layer read and write, and what orders their accesses.
//
// In a call each rank writes its tokens to the ranks that hold their experts, and those write sums back. There are no
// arrival flags: memory that will be written holds the sentinel kNothing, which no write equals. A reader polls until
// it changes, and then restores it. A launch's writes are in L2, where those of other GPUs arrive, before the next
// launch passes its wait; so nothing new is overwritten. A rank begins a call once all ranks have received the tokens
// of the call before: each of them counts its calls in every rank's memory, when the last combine_rows begins. By then
// it has also cleared the counts of pairs. Pairs are double-buffered by call.
#pragma once

#include "ptx.cuh"

constexpr int kMaxRanks = 8;
constexpr int kCounterStride = 32;    // u32: each counter has a cache line of its own
constexpr u32 kNothing = 0xffffffff;  // NaNs in e4m3, bf16 and fp32, but arithmetic yields a different NaN
constexpr u32 kNoGroup = 0xfffffffe;  // instead of a PairDestination, for a pair whose expert is on another rank
constexpr int kMaxSegments = 8;       // of a rank's pairs, see permutation_of_ranks.cu

// A token's expert, and its weight: one word of 8 bytes, so `sorted` announces both.
struct __align__(8) Pair {
    u32 sorted;  // with few pairs the expert's group on the rank that holds it
    float weight;

    __device__ __forceinline__ u64 packed() const { return static_cast<u64>(__float_as_uint(weight)) << 32 | sorted; }
    static __device__ __forceinline__ Pair of(u64 packed) {
        return {static_cast<u32>(packed), __uint_as_float(static_cast<u32>(packed >> 32))};
    }
};

// Where a pair belongs on the rank that holds its expert.
struct PairDestination {
    u32 group, segment;  // of the pairs of its token's rank
    u32 index;           // among those of the segment with the same expert; less than MAX_RANK_PAIRS in limits.py

    __device__ __forceinline__ u32 packed() const { return index << 13 | segment << 10 | group; }
    static __device__ __forceinline__ PairDestination of(u32 packed) {
        return {packed % 1024, packed / 1024 % 8, packed >> 13};
    }
};

// The memory of one rank; every rank has one of the same layout. Sizes are those of kernels/rank_memory.py.
struct RankMemory {
    u64 consumed;      // u32 [kMaxRanks][kCounterStride]: calls whose tokens each rank is done with
    u64 counts;        // u32 [groups, kMaxRanks * kMaxSegments]: each group's pairs in every segment of all ranks
    u64 pairs;         // Pair [2, max_tokens, top_k]: of calls in turn
    u64 data;          // e4m3 [max_tokens, h]
    u64 scales;        // fp32 [max_tokens, ceil(h / 128)]
    u64 partial_sums;  // bf16 [num_ranks, max_own_tokens, h]: of this rank's own tokens, by the rank that computed
                       // them; with combine_slots.cuh [max_own_tokens, top_k, h], of each slot
};

// The tokens of each rank in a call, as kernel arguments: three ranks' in a word, as RankTokens.packed in
// kernels/rank_memory.py.
#define RANK_TOKENS u64 tokens_0, u64 tokens_3, u64 tokens_6

// Writes where each rank's tokens begin among those of all, [kMaxRanks + 1]; one thread calls it.
__device__ __forceinline__ void write_firsts(int* firsts, RANK_TOKENS) {
    constexpr u32 kBits = 20;
    const u64 words[3] = {tokens_0, tokens_3, tokens_6};
    int first = 0;
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
        firsts[rank] = first;
        first += static_cast<int>(words[rank / 3] >> (rank % 3 * kBits) & ((1u << kBits) - 1));
    }
    firsts[kMaxRanks] = first;
}

// The calling rank's view: all memories, and its own state.
struct __align__(16) Ranks {
    RankMemory memory[kMaxRanks];  // addresses in the caller's address space
    u32 num_ranks, rank;
    u32 calls;      // that have begun: permutation_of_ranks.cu and few_pairs_of_ranks.cu count them
    u32 max_pairs;  // of a call
    u64 status;     // u32 in pinned host memory: 0, or 1 + the rank that was waited for in vain
    u64 timeout;    // nanoseconds
    u64 max_own_tokens;
    u64 here;  // this state in memory

    // Where a rank has the pairs of the call before which `calls` have begun.
    __device__ __forceinline__ Pair* pairs(u32 owner, u32 calls) const {
        return reinterpret_cast<Pair*>(memory[owner].pairs) + static_cast<u64>(calls % 2) * max_pairs;
    }

    // Where a rank has the numbers of a group's pairs.
    __device__ __forceinline__ u32* counts(u32 owner, u32 group) const {
        return reinterpret_cast<u32*>(memory[owner].counts) + group * (kMaxRanks * kMaxSegments);
    }

    // When a launch that begins now gives up waiting.
    __device__ __forceinline__ u64 until() const { return ptx::global_nanoseconds() + timeout; }

    // Whether it is time to give up waiting for a rank; if so, notes which, and lets no later launch wait.
    __device__ __forceinline__ bool is_late(u32 source, u64 until) const {
        if (ptx::global_nanoseconds() < until) return false;
        if (timeout != 0) {
            reinterpret_cast<Ranks*>(here)->timeout = 0;
            ptx::store_release_system(reinterpret_cast<u32*>(status), source + 1);
        }
        return true;
    }

    // Waits until nothing is missing, or gives up: `look` loads again what is, and returns 1 + the rank that sends it,
    // or 0. What it returns is as of its last call, so it has the last word when time is up.
    template <class Look>
    __device__ __forceinline__ void wait_while_missing(u64 until, const Look& look) const {
        u32 missing = look();
        bool last = false;
        while (missing != 0 && !(last && is_late(missing - 1, until))) {
            last = ptx::global_nanoseconds() >= until;  // read while loads are on their way
            missing = look();
        }
    }

    // What `source` writes to `place`, once it is there; `value` was there before.
    template <class Value>
    __device__ __forceinline__ Value wait_for(Value value, const Value* place, u32 source, u64 until) const {
        wait_while_missing(until, [&]() -> u32 {
            if (!is_missing(value)) return 0;
            value = ptx::load_relaxed_system(place);
            return source + 1;
        });
        return value;
    }

    // Waits until all ranks are done with the tokens of all calls so far; called by all threads of a CTA. `seen`: the
    // own counter of rank threadIdx.x.
    __device__ __forceinline__ void wait_for_consumed(u32 seen, u64 until) const {
        if (threadIdx.x < num_ranks) {
            while (static_cast<int>(seen - calls) < 0 && !is_late(threadIdx.x, until))
                seen = ptx::load_acquire_system(consumed(rank, threadIdx.x));
        }
        __syncthreads();
    }

    // Tells a rank that this one has received the tokens of all calls so far, and has cleared their places, which
    // earlier launches have done. A fence_system after those makes it a release.
    __device__ __forceinline__ void announce_consumed(u32 to) const {
        if (to < num_ranks) ptx::store_relaxed_system(consumed(to, rank), calls);
    }

    static __device__ __forceinline__ bool is_missing(u32 word) { return word == kNothing; }
    static __device__ __forceinline__ bool is_missing(uint4 four) {
        return four.x == kNothing || four.y == kNothing || four.z == kNothing || four.w == kNothing;
    }

  private:
    __device__ __forceinline__ u32* consumed(u32 owner, u32 source) const {
        return reinterpret_cast<u32*>(memory[owner].consumed) + source * kCounterStride;
    }
};

// Begins to copy the state to shared memory; all threads of a CTA call it. An earlier launch has changed it, and may
// still run beside one that has read it on the same SM: what L1 holds may be old.
__device__ __forceinline__ void copy_ranks(Ranks& to, const Ranks* from) {
    static_assert(sizeof(Ranks) % 16 == 0 && sizeof(Ranks) / 16 <= 32);
    if (threadIdx.x < sizeof(Ranks) / 16)
        ptx::copy_async(reinterpret_cast<uint4*>(&to) + threadIdx.x,
                        reinterpret_cast<const uint4*>(from) + threadIdx.x);
}

// Begins to copy words to shared memory; all threads of a CTA call it. Reading them where they are costs a microsecond
// for each load that depends on another.
__device__ __forceinline__ void copy_words(int* to, const int* from, int count) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
        ptx::copy_word_async(to + i, from + i);
}
