// As permutation_of_ranks.cu, for few pairs: each rank sends its own as they are, and compares all with each other.
// Begins a call, see ranks.cuh.
#include "permutation.cuh"
#include "rank_pairs.cuh"

constexpr int kFewPairs = FEW_PAIRS;  // one for each thread

extern "C" __global__ void __launch_bounds__(kFewPairs, 1)
    few_pairs_of_ranks(const int* topk_ids,             // [own_pairs] of this rank; ids out of range are ignored
                       const float* topk_weights,       // [own_pairs]
                       int own_pairs, int first_pair,   // its index among the pairs of all ranks
                       const int* __restrict__ places,  // [num_experts]: rank * 65536 + group of each expert
                       int num_experts, Ranks* ranks_in_memory,
                       const u32* consumed,  // [kMaxRanks][kCounterStride], of this rank's memory
                       RANK_TOKENS, int num_pairs, int top_k, int num_groups,
                       int* __restrict__ inverse_permutation,  // [num_pairs], the permuted row of each pair, -1: none
                       int* __restrict__ offsets, int* __restrict__ offsets_copy,  // see Offsets
                       int* __restrict__ tile_counters                             // likewise
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;
    __shared__ int firsts[kMaxRanks + 1];
    const int thread = threadIdx.x;
    copy_ranks(ranks, ranks_in_memory);
    copy_words(place_of, places, num_experts);
    if (threadIdx.x == 0) write_firsts(firsts, tokens_0, tokens_3, tokens_6);
    const u32 seen = thread < kMaxRanks ? ptx::load_acquire_system(consumed + thread * kCounterStride) : 0;
    ptx::grid_dependency_wait();
    const int id = thread < own_pairs ? topk_ids[thread] : -1;
    const float weight = thread < own_pairs ? topk_weights[thread] : 0.0f;
    ptx::wait_for_async_copies();
    __syncthreads();
    const u64 until = ranks.until();
    ranks.wait_for_consumed(seen, until);
    ptx::launch_dependents();  // may send tokens from now on
    const int at = static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1;
    if (thread < own_pairs) send<1>(ranks, first_pair + thread, 1, {at}, {static_cast<u32>(at) & 0xffff}, {weight});
    IncomingPairs<1> incoming = {ranks, firsts, top_k, num_pairs, kFewPairs, until, {{kNoGroup, 0.0f}}};
    incoming.load(thread);
    incoming.wait(thread);
    if (thread == 0) ranks_in_memory->calls = ranks.calls + 1;
    compare_all<kFewPairs>(incoming.pairs[0].sorted, num_pairs, inverse_permutation,
                           {offsets, offsets_copy, tile_counters, num_groups});
}
