// Quantizes this rank's tokens and writes each to every rank that holds one of its experts, with its groups and weights
// there: e4m3 with an fp32 scale per row and 128 columns.
//
// The arithmetic is that of quantize_permute.cu: the same bits as on one GPU.
#include "quantize.cuh"
#include "ranks.cuh"

constexpr int kWarps = 4;
constexpr auto kDatatype = floats::DATATYPE;

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    dispatch_rows(Ranks* ranks,
                  const int* __restrict__ first_tokens,     // [num_ranks + 1]: rank r has those from first_tokens[r] on
                  const int* __restrict__ places,           // [num_experts]: rank * 65536 + group of each expert
                  int num_experts,
                  const void* __restrict__ hidden_states,   // [num_tokens, h], contiguous
                  const int* topk_ids,                      // [num_tokens, top_k]; others name no expert
                  const float* topk_weights,                // [num_tokens, top_k]
                  int num_tokens, int top_k, int h) {
    constexpr int kColumns = kWarps * 32 * quantize::kEach;  // per CTA; the CTAs of a token are neighbors
    const int parts = (h + kColumns - 1) / kColumns;
    const int token = static_cast<int>(blockIdx.x) / parts, thread = static_cast<int>(threadIdx.x);
    const int column = static_cast<int>(blockIdx.x) % parts * kColumns + thread * quantize::kEach;
    const int num_ranks = static_cast<int>(ranks->num_ranks);
    __shared__ u32 wanted;  // a bit per rank that holds an expert of the token
    if (thread == 0) wanted = 0;
    quantize::Row row;
    if (token < num_tokens) row.load<kDatatype>(hidden_states, static_cast<i64>(token) * h + column, column < h);
    ptx::grid_dependency_wait();  // the routing may not be complete yet; the tokens are
    ptx::launch_dependents();
    __syncthreads();
    if (token < num_tokens) {
        const i64 place = first_tokens[ranks->rank] + static_cast<i64>(token);
        for (int slot = thread; slot < top_k; slot += kWarps * 32) {
            const int id = topk_ids[static_cast<i64>(token) * top_k + slot];
            const int at = static_cast<u32>(id) < static_cast<u32>(num_experts) ? places[id] : -1;
            const float weight = topk_weights[static_cast<i64>(token) * top_k + slot];
            if (at >= 0) atomicOr(&wanted, 1u << (at >> 16));
            if (blockIdx.x % parts != 0) continue;  // one of the token's CTAs writes them
            for (int to = 0; to < num_ranks; ++to) {
                const RankMemory& memory = ranks->memory[to];
                reinterpret_cast<int*>(memory.group_ids)[place * top_k + slot] = at >> 16 == to ? at & 0xffff : -1;
                reinterpret_cast<float*>(memory.topk_weights)[place * top_k + slot] = weight;
            }
        }
        __syncthreads();
        for (int i = 0; i < num_ranks; ++i) {
            const int to = (static_cast<int>(ranks->rank) + i) % num_ranks;  // not all to the same rank at once
            if ((wanted >> to & 1) == 0 || column >= h) continue;
            const RankMemory& memory = ranks->memory[to];
            *reinterpret_cast<uint4*>(memory.data + place * h + column) = row.packed();
            if (thread % 8 == 0) reinterpret_cast<float*>(memory.scales)[place * (h / 128) + column / 128] = row.scale;
        }
    }
    ranks->announce(DISPATCH, gridDim.x);
}
