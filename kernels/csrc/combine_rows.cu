// Returns what this rank has computed for tokens of other ranks, and adds up what all ranks have computed for its own
// ones. The launch with the last columns tells the other ranks that the next call may begin.
#include "combine_slots.cuh"
#include "combine_staged.cuh"

static_assert(!(STAGED && BIASED), "staged sums have no biases");

extern "C" __global__ void __launch_bounds__(combine::kThreads, CTAS)
    combine_rows(const Ranks* ranks, RANK_TOKENS, const int* __restrict__ places, int num_experts,  // see Problem
                 const int* __restrict__ topk_ids, const float* __restrict__ topk_weights,          // likewise
                 const u16* rows, const int* __restrict__ inverse_permutation,                      // likewise
                 int max_rank_tokens,                                                               // tokens of a rank
                 int ctas_per_token,                                                                // see Items
                 int* counters,                                       // see run_all_staged
                 int top_k, int n, int first_column, int end_column,  // see Problem
                 const u16* __restrict__ bias,                        // likewise
                 void* __restrict__ out                               // kDatatype [num_tokens of this rank, n]
    ) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ combine::Shared shared;
    int* const place_of = reinterpret_cast<int*>(memory + STORAGE_BYTES);
    if (threadIdx.x == 0) write_firsts(shared.firsts, tokens_0, tokens_3, tokens_6);
    combine::fill(shared, place_of, ranks, places, num_experts);
    const combine::Problem problem = {rows, inverse_permutation, topk_ids,   topk_weights, place_of, num_experts, top_k,
                                      n,    first_column,        end_column, bias,         out};
    const combine::Items items = combine::items_of(shared, problem, max_rank_tokens, ctas_per_token);
#if STAGED
    combine::run_all_staged(items, max_rank_tokens, counters,
                            {items, *reinterpret_cast<combine::StagedSums::Storage*>(memory)});
#elif EXACT
    combine::run_all(items, max_rank_tokens, combine::Rows{items});
#else
    combine::run_all(items, max_rank_tokens, combine::Sums{items});
#endif
}
