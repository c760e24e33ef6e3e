// Ends a call: writes the weighted sum of each token's permuted rows on this rank to the rank whose token it is, and
// adds up what all ranks have computed for this rank's tokens.
//
// A rank's sum is in fp32 and in the order of the token's slots, and rounded to bf16; the sums of the ranks are added
// in fp32 and in the order of ranks. A CTA returns a token of each other rank, then completes an own one from its step
// before, whose sums have had that time to arrive.
#include "ranks.cuh"
#include "slots.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = kThreads * 8;  // of a token, per CTA and step
constexpr int kAtOnce = 4;              // ranks whose sums are loaded together
constexpr auto kDatatype = floats::DATATYPE;

// The rows of this rank, and how they were permuted.
struct Permuted {
    const u16* rows;                 // bf16 [rows, n]
    const int* inverse_permutation;  // [num_tokens, top_k] of all ranks, -1: nothing to add
    int top_k, n;
    bool waited;  // for the preceding launch, which writes `rows`; all else was complete before it began

    // Whether a token has rows here; adds them to `sum`. `weights` has one for every `stride` numbers.
    __device__ __forceinline__ bool add(float (&sum)[8], i64 token, const float* weights, int stride, int column) {
        bool any = false;
#pragma unroll 1
        for (int first = 0; first < top_k; first += Slots::kAtOnce) {
            Slots slots;
            slots.load(inverse_permutation + token * top_k + first, weights + first * stride, stride, top_k - first);
            any = any || slots.any();
            wait();
            if (column < n) slots.add(sum, rows, n, column);
        }
        return any;
    }

    __device__ __forceinline__ void wait() {
        if (waited) return;
        ptx::grid_dependency_wait();
        ptx::launch_dependents();
        waited = true;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    combine_rows(Ranks* ranks_in_memory,
                 const int* __restrict__ first_tokens,  // [kMaxRanks + 1]: rank r has those from first_tokens[r] on
                 const int* __restrict__ places,        // [num_experts]: rank * 65536 + group of each expert
                 int num_experts,
                 const int* __restrict__ topk_ids,             // [num_tokens of this rank, top_k]
                 const float* __restrict__ topk_weights,       // likewise
                 const u16* rows,                              // bf16 [rows, n]
                 const int* __restrict__ inverse_permutation,  // [num_tokens of all ranks, top_k], -1: nothing to add
                 int most,                                     // tokens of a rank
                 int top_k, int n,
                 void* __restrict__ out  // kDatatype [num_tokens of this rank, n]
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;
    __shared__ int firsts[kMaxRanks + 1];
    __shared__ bool is_last;
    const int thread = static_cast<int>(threadIdx.x);
    copy_words(reinterpret_cast<u32*>(&ranks), ranks_in_memory, sizeof(Ranks) / 4);
    copy_words(firsts, first_tokens, kMaxRanks + 1);
    copy_words(place_of, places, num_experts);
    __syncthreads();
    const u64 until = ranks.until();
    const int parts = (n + kColumns - 1) / kColumns;
    const i64 max_own_tokens = static_cast<i64>(ranks.max_own_tokens);
    Permuted permuted = {rows, inverse_permutation, top_k, n, false};

    const auto give_back = [&](int owner, int own_token, int column) {
        const i64 token = firsts[owner] + own_token;
        if (token >= firsts[owner + 1]) return;
        const Pair* const pairs = reinterpret_cast<const Pair*>(ranks.own().pairs) + token * top_k;
        float sum[8] = {};
        if (!permuted.add(sum, token, &pairs->weight, sizeof(Pair) / sizeof(float), column) || column >= n) return;
        const i64 place = ranks.rank * max_own_tokens + own_token;
        u16* const there = reinterpret_cast<u16*>(ranks.memory[owner].partial_sums) + place * n + column;
        ptx::store_relaxed_system(reinterpret_cast<uint4*>(there), floats::pack<true>(sum));
    };
    const auto complete = [&](i64 own_token, int column) {
        u32 computed = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 1
        for (int slot = thread % 32, first = 0; first < top_k; slot += 32, first += 32) {
            const int id = slot < top_k ? topk_ids[own_token * top_k + slot] : -1;
            const int at = static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1;
            computed |= __reduce_or_sync(0xffffffff, at >= 0 ? 1u << (at >> 16) : 0);
        }
        float sum[8] = {};
        permuted.add(sum, firsts[ranks.rank] + own_token, topk_weights + own_token * top_k, 1, column);
        if (column >= n) return;
        const uint4 own = floats::pack<true>(sum);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] = 0.0f;
#pragma unroll 1
        for (u32 first = 0; first < ranks.num_ranks; first += kAtOnce) {
            uint4 four[kAtOnce];
            uint4* place[kAtOnce];
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                u16* const sums = reinterpret_cast<u16*>(ranks.own().partial_sums);
                place[i] = reinterpret_cast<uint4*>(sums + ((first + i) * max_own_tokens + own_token) * n + column);
                four[i] = own;
                if (first + i != ranks.rank && computed >> (first + i) & 1)
                    four[i] = ptx::load_relaxed_system(place[i]);
            }
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                if ((computed >> (first + i) & 1) == 0) continue;
                if (first + i != ranks.rank) {
                    four[i] = ranks.wait_for(four[i], place[i], first + i, until);
                    *place[i] = {kNothing, kNothing, kNothing, kNothing};
                }
                float value[8];
                floats::unpack<true>(value, four[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += value[j];
            }
        }
        floats::store<kDatatype>(out, own_token * n + column, sum);
    };

    const int num_ranks = static_cast<int>(ranks.num_ranks), rank = static_cast<int>(ranks.rank);
    const int own_steps = (firsts[rank + 1] - firsts[rank]) * parts, each = static_cast<int>(gridDim.x);
    int step = static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (; step < most * parts; step += each) {
        const int token = step / parts, column = step % parts * kColumns + thread * 8;
#pragma unroll 1
        for (int i = 1; i < num_ranks; ++i) give_back((rank + i) % num_ranks, token, column);
        const int before = step - each;
        if (before >= 0 && before < own_steps) complete(before / parts, before % parts * kColumns + thread * 8);
    }
    permuted.wait();
    __syncthreads();
    __threadfence();  // the CTA's reads come first
    if (thread == 0) is_last = atomicAdd(&ranks_in_memory->done, 1) == gridDim.x - 1;
    __syncthreads();
    if (is_last) {
        if (thread == 0) ranks_in_memory->done = 0;
        ranks.announce_consumed();
    }
    step -= each;
    if (step >= 0 && step < own_steps) complete(step / parts, step % parts * kColumns + thread * 8);
}
