// Quantizes this rank's tokens and writes each to every rank that holds one of its experts, with its groups and weights
// there: e4m3 with an fp32 scale per row and 128 columns. Begins a call: see ranks.cuh.
//
// The arithmetic is that of quantize_permute.cu: the same bits as on one GPU. Loops are kept rolled: with few tokens,
// instruction fetch dominates, see route_tokens.cu.
#include "quantize.cuh"
#include "ranks.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = kThreads * quantize::kEach;  // of a token, per CTA and step
constexpr auto kDatatype = floats::DATATYPE;

// Copies `count` words to shared memory; all threads call it.
template <class Word>
__device__ __forceinline__ void copy(Word* to, const Word* from, int count) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_rows(Ranks* ranks_in_memory,
                  const int* __restrict__ first_tokens,  // [kMaxRanks + 1]: rank r has those from first_tokens[r] on
                  const int* __restrict__ places,        // [num_experts]: rank * 65536 + group of each expert
                  int num_experts,
                  const void* __restrict__ hidden_states,  // [num_tokens, h], contiguous
                  const int* topk_ids,                     // [num_tokens, top_k]; others name no expert
                  const float* topk_weights,               // [num_tokens, top_k]
                  int num_tokens, int top_k, int h,
                  int max_ctas,         // of each rank's launch of this kernel
                  int tokens_are_ready  // the preceding launch does not write them
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;            // a copy: loads that depend on each other cost a microsecond each
    __shared__ int firsts[kMaxRanks + 1];
    const u32 parts = static_cast<u32>(h + kColumns - 1) / kColumns, steps = static_cast<u32>(num_tokens) * parts;
    const u32 thread = threadIdx.x;
    bool has_begun = false;
    if (!tokens_are_ready) ptx::grid_dependency_wait();
#pragma unroll 1
    for (u32 step = blockIdx.x; step < steps || !has_begun; step += gridDim.x) {
        const u32 token = step / parts, part = step - token * parts;
        const u32 column = part * kColumns + thread * quantize::kEach;
        const i64 first_pair = static_cast<i64>(token) * top_k;
        quantize::Row row;
        row.load<kDatatype>(hidden_states, static_cast<i64>(token) * h + column, step < steps && column < h);
        if (!has_begun) {
            has_begun = true;
            copy(reinterpret_cast<u32*>(&ranks), reinterpret_cast<const u32*>(ranks_in_memory), sizeof(Ranks) / 4);
            copy(firsts, first_tokens, kMaxRanks + 1);
            copy(place_of, places, num_experts);
            __syncthreads();
            ranks.wait(CONSUMED);
            ptx::grid_dependency_wait();  // the routing may not be complete yet
            ptx::launch_dependents();
            if (blockIdx.x == 0 && thread < ranks.num_ranks) {  // the preceding call, which reads these, is complete
                const int all = (firsts[thread + 1] - firsts[thread]) * static_cast<int>(parts);
                atomicAdd(&ranks_in_memory->reached[DISPATCHED][thread], min(max(all, 1), max_ctas));
            }
            if (step >= steps) break;
        }
        const i64 place = firsts[ranks.rank] + static_cast<i64>(token);
        u32 wanted = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 1
        for (int slot = thread % 32, first_slot = 0; first_slot < top_k; slot += 32, first_slot += 32) {
            const int id = slot < top_k ? topk_ids[first_pair + slot] : -1;
            const int at = static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1;
            wanted |= __reduce_or_sync(0xffffffff, at >= 0 ? 1u << (at >> 16) : 0);
            if (slot >= top_k || thread >= 32 || part != 0) continue;  // one warp of the token's CTAs writes them
            const float weight = topk_weights[first_pair + slot];
#pragma unroll 1
            for (int to = 0; to < static_cast<int>(ranks.num_ranks); ++to) {
                const RankMemory& memory = ranks.memory[to];
                reinterpret_cast<int*>(memory.group_ids)[place * top_k + slot] = at >> 16 == to ? at & 0xffff : -1;
                reinterpret_cast<float*>(memory.topk_weights)[place * top_k + slot] = weight;
            }
        }
        u32 to = ranks.rank;  // first: not all ranks write to the same one at once
#pragma unroll 1
        for (u32 i = 0; i < ranks.num_ranks; ++i, to = to + 1 == ranks.num_ranks ? 0 : to + 1) {
            if ((wanted >> to & 1) == 0 || column >= h) continue;
            const RankMemory& memory = ranks.memory[to];
            *reinterpret_cast<uint4*>(memory.data + place * h + column) = row.packed();
            if (thread % 8 == 0)
                reinterpret_cast<float*>(memory.scales)[place * (static_cast<u32>(h) / 128) + column / 128] = row.scale;
        }
    }
    ranks.announce(DISPATCHED);
}
