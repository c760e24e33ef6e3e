// The order in which a CTA returns tokens and completes own ones.
//
// A CTA returns a token of each other rank, then completes an own token from half a round of all CTAs before, whose
// rows have had that time to arrive. With few tokens, several CTAs share these.
#pragma once

#include "floats.cuh"
#include "ranks.cuh"

namespace combine {

constexpr int kThreads = THREADS;
constexpr int kColumns = COLUMNS;  // of a token, by a CTA at once
constexpr bool kBiased = BIASED;
constexpr auto kDatatype = floats::DATATYPE;

struct Problem {
    const u16* rows;                 // bf16 [rows, n]
    const int* inverse_permutation;  // [num_tokens of all ranks, top_k], -1: nothing to add
    const int* topk_ids;             // [num_tokens of this rank, top_k]
    const float* topk_weights;       // likewise
    const int* place_of;             // [num_experts]: rank * 65536 + group of each expert
    int num_experts, top_k, n;
    int first_column, end_column;  // that this launch computes; the call's last launch has those up to n
    const u16* bias;               // bf16 [num_experts, n], added to an expert's rows; only with kBiased
    void* out;                     // kDatatype [num_tokens of this rank, n]

    __device__ __forceinline__ int parts() const { return (end_column - first_column + kColumns - 1) / kColumns; }
};

// What a CTA does next: returns a token to the `other`-th rank from this one on, or completes an own one (the last).
struct Item {
    int token, other;
};

struct Items {
    const Ranks& ranks;
    const int* firsts;  // [kMaxRanks + 1]: rank r has the tokens from firsts[r] on
    const Problem& problem;
    int column;          // this thread's first one; n: it has none
    int ctas_per_token;  // CTAs that share a token's columns
    int stride;          // tokens of a round of all CTAs
    int lag;             // completion lags by this many tokens
    u64 until;

    // This thread's first column of a chunk of them; n: it has none.
    __device__ __forceinline__ int column_of(int chunk) const {
        const int other = column + chunk * (kThreads * 8);
        return other < problem.end_column ? other : problem.n;
    }

    __device__ __forceinline__ bool completes(Item item) const {
        return item.other == static_cast<int>(ranks.num_ranks);
    }
    __device__ __forceinline__ int owner(Item item) const {
        const int owner = static_cast<int>(ranks.rank) + item.other, num_ranks = static_cast<int>(ranks.num_ranks);
        return owner < num_ranks ? owner : owner - num_ranks;
    }
    __device__ __forceinline__ int token(Item item) const {  // of its rank
        return completes(item) ? item.token - lag : item.token;
    }
    __device__ __forceinline__ bool exists(Item item) const {
        const int owner = this->owner(item), token = this->token(item);
        return token >= 0 && token < firsts[owner + 1] - firsts[owner];
    }
    __device__ __forceinline__ i64 pairs(Item item) const {  // of its token, among those of all ranks
        return static_cast<i64>(firsts[owner(item)] + token(item)) * problem.top_k;
    }
    __device__ __forceinline__ const Pair* pairs_of(Item item) const {  // its pairs
        return ranks.pairs(ranks.rank, ranks.calls - 1) + pairs(item);
    }
    __device__ __forceinline__ int own_id(Item item, int slot) const {  // of an own token's expert, -1: none
        return slot < problem.top_k ? problem.topk_ids[static_cast<i64>(token(item)) * problem.top_k + slot] : -1;
    }
    __device__ __forceinline__ float own_weight(Item item, int slot) const {
        return problem.topk_weights[static_cast<i64>(token(item)) * problem.top_k + slot];
    }
    __device__ __forceinline__ uint4 bias(int id) const {  // of an expert, this thread's columns
        return *reinterpret_cast<const uint4*>(problem.bias + static_cast<i64>(id) * problem.n + column);
    }
    __device__ __forceinline__ int place_of(int id) const {  // -1: none
        return static_cast<u32>(id) < static_cast<u32>(problem.num_experts) ? problem.place_of[id] : -1;
    }
    __device__ __forceinline__ u16* partial_sums(u32 owner, i64 row) const {
        return reinterpret_cast<u16*>(ranks.memory[owner].partial_sums) + row * problem.n;
    }
    __device__ __forceinline__ const uint4* computed(int row) const {  // this thread's columns
        return reinterpret_cast<const uint4*>(problem.rows + static_cast<i64>(row) * problem.n + column);
    }
    __device__ __forceinline__ int index() const { return static_cast<int>(blockIdx.x) / problem.parts(); }
    __device__ __forceinline__ Item first() const { return {index() / ctas_per_token, index() % ctas_per_token + 1}; }
    __device__ __forceinline__ Item after(Item item) const {
        const int other = item.other + ctas_per_token;
        if (other <= static_cast<int>(ranks.num_ranks)) return {item.token, other};
        return {item.token + stride, index() % ctas_per_token + 1};
    }
};

// Memory of a launch, besides a copy of places.
struct Shared {
    Ranks ranks;
    int firsts[kMaxRanks + 1];
};

// Waits for the preceding launch. All tokens have been received then: the call's last launch tells the other ranks.
__device__ __forceinline__ void begin(const Items& items) {
    const bool announces = blockIdx.x == 0 && items.problem.end_column == items.problem.n;
    if (announces && threadIdx.x < kMaxRanks) ptx::fence_system();  // while that launch still runs
    ptx::grid_dependency_wait();  // all but `rows` was complete before that launch let this one begin
    ptx::launch_dependents();
    if (announces) items.ranks.announce_consumed(threadIdx.x);
}

// Runs everything of a CTA: `fetch` loads what does not depend on the preceding launch, one item ahead of `run`.
template <class How>
__device__ __forceinline__ void run_all(const Items& items, int max_rank_tokens, const How& how) {
    Item item = items.first();
    auto next = how.fetch(item);
    begin(items);
    const int end = max_rank_tokens + items.lag;
#pragma unroll 1
    while (item.token < end) {
        const Item now = item;
        const auto fetched = next;
        item = items.after(item);
        next = how.fetch(item);
        if (items.exists(now)) how.run(now, fetched);
    }
}

// What a CTA needs, once `shared` is filled.
__device__ __forceinline__ Items items_of(const Shared& shared, const Problem& problem, int max_rank_tokens,
                                          int ctas_per_token) {
    const int parts = problem.parts(), stride = static_cast<int>(gridDim.x) / parts / ctas_per_token;
    const int part = static_cast<int>(blockIdx.x) % parts;
    const int column = problem.first_column + part * kColumns + static_cast<int>(threadIdx.x) * 8;
    return {shared.ranks,
            shared.firsts,
            problem,
            column < problem.end_column ? column : problem.n,
            ctas_per_token,
            stride,
            stride < max_rank_tokens ? stride / 2 : 0,
            shared.ranks.until()};
}

// Copies to shared memory what launches before the preceding one have written; all threads call it, once thread 0
// has written `firsts`.
__device__ __forceinline__ void fill(Shared& shared, int* place_of, const Ranks* ranks, const int* places,
                                     int num_experts) {
    copy_ranks(shared.ranks, ranks);
    copy_words(place_of, places, num_experts);
    ptx::wait_for_async_copies();
    __syncthreads();
}

}  // namespace combine
