// Quantizes this rank's tokens and writes each to every rank that holds one of its experts, with its groups and weights
// there: e4m3 with an fp32 scale per row and 128 columns. Begins a call: see ranks.cuh.
//
// The arithmetic is that of quantize_permute.cu: the same bits as on one GPU.
#include "quantize.cuh"
#include "ranks.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = kThreads * quantize::kEach;  // of a token, per CTA and step
constexpr auto kDatatype = floats::DATATYPE;

// Copies `count` words to shared memory; all threads call it.
template <class Word>
__device__ __forceinline__ void copy(Word* to, const Word* from, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_rows(Ranks* ranks_in_memory,
                  const int* __restrict__ first_tokens,    // [kMaxRanks + 1]: rank r has those from first_tokens[r] on
                  const int* __restrict__ places,          // [num_experts]: rank * 65536 + group of each expert
                  int num_experts,
                  const void* __restrict__ hidden_states,  // [num_tokens, h], contiguous
                  const int* topk_ids,                     // [num_tokens, top_k]; others name no expert
                  const float* topk_weights,               // [num_tokens, top_k]
                  int num_tokens, int top_k, int h,
                  int max_ctas,     // of each rank's launch of this kernel
                  int combine_ctas  // of each rank's launch of return_rows
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;            // a copy: loads that depend on each other cost a microsecond each
    __shared__ int firsts[kMaxRanks + 1];
    const int parts = (h + kColumns - 1) / kColumns, steps = num_tokens * parts;
    const int thread = static_cast<int>(threadIdx.x), column_of_thread = thread * quantize::kEach;
    int step = static_cast<int>(blockIdx.x);
    int token = step / parts, column = step % parts * kColumns + column_of_thread;
    quantize::Row row;
    if (step < steps) row.load<kDatatype>(hidden_states, static_cast<i64>(token) * h + column, column < h);
    copy(reinterpret_cast<u32*>(&ranks), reinterpret_cast<const u32*>(ranks_in_memory), sizeof(Ranks) / 4);
    copy(firsts, first_tokens, kMaxRanks + 1);
    copy(place_of, places, num_experts);
    ptx::grid_dependency_wait();  // the routing may not be complete yet; the tokens are
    ptx::launch_dependents();
    __syncthreads();
    if (blockIdx.x == 0 && thread < ranks.num_ranks) {  // the preceding call, which reads these, is complete
        const int ctas = min(max((firsts[thread + 1] - firsts[thread]) * parts, 1), max_ctas);
        ranks_in_memory->arrived[DISPATCH][thread] += ctas;
        ranks_in_memory->arrived[COMBINE][thread] += combine_ctas;
    }
    const int first = firsts[ranks.rank];
#pragma unroll 1
    while (step < steps) {
        const i64 place = first + token;
        u32 wanted = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 8
        for (int slot = 0; slot < top_k; ++slot) {
            const int id = topk_ids[static_cast<i64>(token) * top_k + slot];
            const int at = static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1;
            if (at >= 0) wanted |= 1u << (at >> 16);
            if (slot % kThreads != thread || step % parts != 0) continue;  // one of the token's CTAs writes them
            const float weight = topk_weights[static_cast<i64>(token) * top_k + slot];
            for (int to = 0; to < static_cast<int>(ranks.num_ranks); ++to) {
                const RankMemory& memory = ranks.memory[to];
                reinterpret_cast<int*>(memory.group_ids)[place * top_k + slot] = at >> 16 == to ? at & 0xffff : -1;
                reinterpret_cast<float*>(memory.topk_weights)[place * top_k + slot] = weight;
            }
        }
        for (u32 i = 0; i < ranks.num_ranks && column < h; ++i) {
            const u32 to = (ranks.rank + i) % ranks.num_ranks;  // not all to the same rank at once
            if ((wanted >> to & 1) == 0) continue;
            const RankMemory& memory = ranks.memory[to];
            *reinterpret_cast<uint4*>(memory.data + place * h + column) = row.packed();
            if (thread % 8 == 0) reinterpret_cast<float*>(memory.scales)[place * (h / 128) + column / 128] = row.scale;
        }
        step += static_cast<int>(gridDim.x);
        token = step / parts, column = step % parts * kColumns + column_of_thread;
        if (step < steps) row.load<kDatatype>(hidden_states, static_cast<i64>(token) * h + column, column < h);
    }
    ranks.announce(DISPATCH);
}
