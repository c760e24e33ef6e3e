// Ends a call: returns what this rank has computed for tokens of other ranks, and adds up what all ranks have computed
// for its own ones.
#include "combine_slots.cuh"
#include "combine_sums.cuh"

#if EXACT
using How = combine::Rows;
#else
using How = combine::Sums;
#endif

extern "C" __global__ void __launch_bounds__(combine::kThreads, CTAS)
    combine_rows(Ranks* ranks,
                 const int* __restrict__ first_tokens,  // [kMaxRanks + 1]: rank r has those from first_tokens[r] on
                 const int* __restrict__ places, int num_experts,                           // see Problem
                 const int* __restrict__ topk_ids, const float* __restrict__ topk_weights,  // likewise
                 const u16* rows, const int* __restrict__ inverse_permutation,              // likewise
                 int most,                                                                  // tokens of a rank
                 int top_k, int n,
                 void* __restrict__ out  // kDatatype [num_tokens of this rank, n]
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ combine::Shared shared;
    combine::fill(shared, place_of, ranks, first_tokens, places, num_experts);
    const combine::Problem problem = {
        rows, inverse_permutation, topk_ids, topk_weights, place_of, num_experts, top_k, n, out};
    const combine::Items items = combine::items_of(shared, problem, most);
    const How how = {items};
    combine::run_all(
        ranks, shared, items, most, [&](combine::Item item) { return how.fetch(item); },
        [&](combine::Item item, const How::Fetched& fetched) { how.run(item, fetched); });
}
