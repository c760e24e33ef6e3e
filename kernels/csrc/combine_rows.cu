// Ends a call: writes the weighted sum of each token's permuted rows on this rank to the rank whose token it is, and
// adds up what all ranks have computed for this rank's tokens.
//
// A rank's sum is in fp32 and in the order of the token's slots, and rounded to bf16; the sums of the ranks are added
// in fp32 and in the order of ranks. A CTA returns a token of each other rank, then completes an own one from its step
// before, whose sums have had that time to arrive. With few tokens, each of these has a CTA of its own.
#include "ranks.cuh"
#include "slots.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = kThreads * 8;  // of a token, per CTA and step
constexpr int kAtOnce = 4;              // ranks whose sums are loaded together
constexpr auto kDatatype = floats::DATATYPE;

struct Problem {
    const u16* rows;                 // bf16 [rows, n]
    const int* inverse_permutation;  // [num_tokens of all ranks, top_k], -1: nothing to add
    const int* topk_ids;             // [num_tokens of this rank, top_k]
    const float* topk_weights;       // likewise
    const int* place_of;             // [num_experts]: rank * 65536 + group of each expert
    int num_experts, top_k, n;
    void* out;  // kDatatype [num_tokens of this rank, n]
};

// What a CTA does next: returns a token to the `other`-th rank from this one on, or completes an own one (the last).
struct Item {
    int token, other;
};

// What is loaded early for an item.
struct Fetched {
    Slots slots;
    int id = -1;  // lane l: the expert in slot l
};

struct Combine {
    const Ranks& ranks;
    const int* firsts;  // [kMaxRanks + 1]
    const Problem& problem;
    int column;
    int each;  // CTAs for the same columns; 0: a CTA has one item
    u64 until;

    __device__ __forceinline__ bool completes(Item item) const {
        return item.other == static_cast<int>(ranks.num_ranks);
    }
    __device__ __forceinline__ int owner(Item item) const {
        const int owner = static_cast<int>(ranks.rank) + item.other, num_ranks = static_cast<int>(ranks.num_ranks);
        return owner < num_ranks ? owner : owner - num_ranks;
    }
    __device__ __forceinline__ int token(Item item) const {  // of its rank
        return completes(item) ? item.token - each : item.token;
    }
    __device__ __forceinline__ bool exists(Item item) const {
        const int owner = this->owner(item), token = this->token(item);
        return token >= 0 && token < firsts[owner + 1] - firsts[owner];
    }
    __device__ __forceinline__ i64 pairs(Item item) const {  // of its token, among those of all ranks
        return static_cast<i64>(firsts[owner(item)] + token(item)) * problem.top_k;
    }
    __device__ __forceinline__ Item after(Item item) const {
        return completes(item) ? Item{item.token + each, 1} : Item{item.token, item.other + 1};
    }

    __device__ __forceinline__ Slots slots(Item item, int first = 0) const {
        Slots slots;
        const i64 pair = pairs(item) + first;
        const int count = problem.top_k - first;
        if (completes(item)) {
            const i64 own = static_cast<i64>(token(item)) * problem.top_k + first;
            slots.load(problem.inverse_permutation + pair, problem.topk_weights + own, 1, count);
        } else {
            const Pair* const sent = reinterpret_cast<const Pair*>(ranks.own().pairs) + pair;
            slots.load(problem.inverse_permutation + pair, &sent->weight, sizeof(Pair) / sizeof(float), count);
        }
        return slots;
    }
    __device__ __forceinline__ int id(Item item, int slot) const {
        return slot < problem.top_k ? problem.topk_ids[static_cast<i64>(token(item)) * problem.top_k + slot] : -1;
    }
    __device__ __forceinline__ Fetched fetch(Item item) const {
        Fetched fetched;
        if (!exists(item)) return fetched;
        fetched.slots = slots(item);
        if (completes(item)) fetched.id = id(item, static_cast<int>(threadIdx.x % 32));
        return fetched;
    }

    __device__ __forceinline__ void run(Item item, const Fetched& fetched) const {
        float sum[8] = {};
        bool any = fetched.slots.any();
        fetched.slots.add(sum, problem.rows, problem.n, column);
#pragma unroll 1
        for (int first = Slots::kMost; first < problem.top_k; first += Slots::kMost) {
            const Slots more = slots(item, first);
            any = any || more.any();
            more.add(sum, problem.rows, problem.n, column);
        }
        const uint4 own = floats::pack<true>(sum);
        if (completes(item)) {
            const u32 computed = ranks_of(item, fetched.id);
            if (column < problem.n) complete(own, computed, token(item));
        } else if (any && column < problem.n) {
            ptx::store_relaxed_system(place(owner(item), ranks.rank, token(item)), own);
        }
    }

  private:
    // A bit per rank that holds an expert of the item's token.
    __device__ __forceinline__ u32 ranks_of(Item item, int id) const {
        u32 found = 0;
#pragma unroll 1
        for (int slot = static_cast<int>(threadIdx.x % 32), first = 0; first < problem.top_k; first += 32) {
            if (first > 0) id = this->id(item, slot + first);
            const bool valid = static_cast<u32>(id) < static_cast<u32>(problem.num_experts);
            const int at = valid ? problem.place_of[id] : -1;
            found |= __reduce_or_sync(0xffffffff, at >= 0 ? 1u << (at >> 16) : 0);
        }
        return found;
    }

    // Where rank `source` writes its sum for a token of `owner`.
    __device__ __forceinline__ uint4* place(u32 owner, u32 source, int token) const {
        const i64 row = source * static_cast<i64>(ranks.max_own_tokens) + token;
        u16* const sums = reinterpret_cast<u16*>(ranks.memory[owner].partial_sums);
        return reinterpret_cast<uint4*>(sums + row * problem.n + column);
    }

    // Adds up the sums of the ranks in `computed`, of which `own` is this rank's.
    __device__ __forceinline__ void complete(uint4 own, u32 computed, int token) const {
        float sum[8] = {};
#pragma unroll 1
        for (u32 first = 0; first < ranks.num_ranks; first += kAtOnce) {
            uint4 four[kAtOnce];
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                const u32 r = first + i;
                four[i] = own;
                if (r != ranks.rank && computed >> r & 1)
                    four[i] = ptx::load_relaxed_system(place(ranks.rank, r, token));
            }
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                const u32 r = first + i;
                if ((computed >> r & 1) == 0) continue;
                if (r != ranks.rank) {
                    uint4* const there = place(ranks.rank, r, token);
                    four[i] = ranks.wait_for(four[i], there, r, until);
                    *there = {kNothing, kNothing, kNothing, kNothing};
                }
                float value[8];
                floats::unpack<true>(value, four[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += value[j];
            }
        }
        floats::store<kDatatype>(problem.out, static_cast<i64>(token) * problem.n + column, sum);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    combine_rows(Ranks* ranks_in_memory,
                 const int* __restrict__ first_tokens,  // [kMaxRanks + 1]: rank r has those from first_tokens[r] on
                 const int* __restrict__ places,        // [num_experts]
                 int num_experts, const int* __restrict__ topk_ids,
                 const float* __restrict__ topk_weights,                        // see Problem
                 const u16* rows, const int* __restrict__ inverse_permutation,  // likewise
                 int most,                                                      // tokens of a rank
                 int top_k, int n,
                 void* __restrict__ out  // see Problem
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;
    __shared__ int firsts[kMaxRanks + 1];
    __shared__ bool is_last;
    copy_words(reinterpret_cast<u32*>(&ranks), ranks_in_memory, sizeof(Ranks) / 4);
    copy_words(firsts, first_tokens, kMaxRanks + 1);
    copy_words(place_of, places, num_experts);
    __syncthreads();
    const Problem problem = {rows, inverse_permutation, topk_ids, topk_weights, place_of, num_experts, top_k, n, out};
    const int parts = (n + kColumns - 1) / kColumns, num_ranks = static_cast<int>(ranks.num_ranks);
    const int index = static_cast<int>(blockIdx.x) / parts, ctas = static_cast<int>(gridDim.x) / parts;
    const int column = static_cast<int>(blockIdx.x) % parts * kColumns + static_cast<int>(threadIdx.x) * 8;
    const bool alone = ctas >= most * num_ranks;
    const Combine combine = {ranks, firsts, problem, column, alone ? 0 : ctas, ranks.until()};
    Item item = alone ? Item{index / num_ranks, index % num_ranks + 1} : Item{index, 1};
    Fetched next = combine.fetch(item);
    ptx::grid_dependency_wait();  // all but `rows` was complete before the preceding launch began
    ptx::launch_dependents();
    const int end = alone ? 0 : most + ctas;  // an own token is completed a step later
#pragma unroll 1
    do {
        const Item now = item;
        const Fetched fetched = next;
        item = combine.after(item);
        if (!alone) next = combine.fetch(item);
        if (combine.exists(now)) combine.run(now, fetched);
    } while (item.token < end);
    __syncthreads();
    __threadfence();  // the CTA's reads come first
    if (threadIdx.x == 0) is_last = atomicAdd(&ranks_in_memory->done, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    if (threadIdx.x == 0) ranks_in_memory->done = 0;
    ranks.announce_consumed(threadIdx.x);
}
