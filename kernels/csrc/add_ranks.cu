// Adds up what the ranks have returned for each of this rank's tokens, in fp32 and in the order of ranks. A rank without
// tokens waits for the others, too: its next call would overwrite what they still read.
#include "floats.cuh"
#include "ranks.cuh"

constexpr auto kDatatype = floats::DATATYPE;

extern "C" __global__ void __launch_bounds__(256)
    add_ranks(Ranks* ranks,
              const int* __restrict__ places,    // [num_experts]: rank * 65536 + group of each expert
              int num_experts,
              const int* __restrict__ topk_ids,  // [num_tokens, top_k]
              int num_tokens, int top_k, int n,
              void* __restrict__ out  // kDatatype [num_tokens, n]
    ) {
    constexpr int kColumns = 256 * 8;  // per CTA; the CTAs of a token are neighbors
    const int parts = (n + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * 8;
    __shared__ u32 computed;  // a bit per rank that holds an expert of the token
    if (threadIdx.x == 0) computed = 0;
    __syncthreads();
    for (int slot = static_cast<int>(threadIdx.x); slot < top_k && token < num_tokens; slot += 256) {
        const int id = topk_ids[token * top_k + slot];
        if (static_cast<u32>(id) < static_cast<u32>(num_experts)) atomicOr(&computed, 1u << (places[id] >> 16));
    }
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    ranks->wait(COMBINE);
    if (column >= n || token >= num_tokens) return;
    const u16* const sums = reinterpret_cast<const u16*>(ranks->own().partial_sums);
    float sum[8] = {};
    for (int r = 0; r < static_cast<int>(ranks->num_ranks); ++r) {
        if ((computed >> r & 1) == 0) continue;
        const i64 place = r * static_cast<i64>(ranks->max_own_tokens) + token;
        float value[8];
        floats::load<floats::BF16>(value, sums, place * n + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += value[j];
    }
    floats::store<kDatatype>(out, token * n + column, sum);
}
