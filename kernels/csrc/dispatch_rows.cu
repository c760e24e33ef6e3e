// Quantizes this rank's tokens and writes each to every rank that holds one of its experts, and all of its experts to
// all ranks: e4m3 with an fp32 scale per row and 128 columns. Begins a call: see ranks.cuh.
//
// The arithmetic is that of quantize_permute.cu: the same bits as on one GPU. Loops are kept rolled: with few tokens,
// instruction fetch dominates, see route_tokens.cu.
#include "quantize.cuh"
#include "ranks.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = kThreads * quantize::kEach;  // of a token, per CTA and step
constexpr auto kDatatype = floats::DATATYPE;

extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_rows(const Ranks* ranks_in_memory,
                  const int* __restrict__ places,  // [num_experts]: rank * 65536 + group of each expert
                  int num_experts,
                  const void* __restrict__ hidden_states,  // [num_tokens, h], contiguous
                  const int* topk_ids,                     // [num_tokens, top_k]; others name no expert
                  const float* topk_weights,               // [num_tokens, top_k]
                  int num_tokens, int top_k, int h,
                  int first_token,      // of this rank, among those of all ranks
                  int tokens_are_ready  // the preceding launch does not write them
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;
    const u32 parts = static_cast<u32>(h + kColumns - 1) / kColumns, steps = static_cast<u32>(num_tokens) * parts;
    const u32 thread = threadIdx.x;
    const auto load = [&](quantize::Row& row, u32 step) {
        const u32 column = step % parts * kColumns + thread * quantize::kEach;
        row.load<kDatatype>(hidden_states, static_cast<i64>(step / parts) * h + column, step < steps && column < h);
    };
    const auto place = [&](int id) { return static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1; };
    if (!tokens_are_ready) ptx::grid_dependency_wait();
    quantize::Row row;
    load(row, blockIdx.x);
    copy_words(reinterpret_cast<u32*>(&ranks), ranks_in_memory, sizeof(Ranks) / 4);
    copy_words(place_of, places, num_experts);
    __syncthreads();
    ranks.wait_for_consumed(ranks.until());
    ptx::grid_dependency_wait();  // the routing may not be complete yet
    ptx::launch_dependents();

    // All pairs first: with them the ranks can permute while tokens are on their way.
    const u32 pairs = static_cast<u32>(num_tokens * top_k);
#pragma unroll 1
    for (u32 pair = blockIdx.x * kThreads + thread; pair < pairs; pair += gridDim.x * kThreads) {
        const int at = place(topk_ids[pair]);
        const u32 weight = __float_as_uint(topk_weights[pair]);
#pragma unroll 1
        for (u32 to = 0; to < ranks.num_ranks; ++to) {
            const u32 group = at >= 0 && static_cast<u32>(at) >> 16 == to ? at & 0xffff : kNoGroup;
            uint2* const there = reinterpret_cast<uint2*>(ranks.memory[to].pairs);
            ptx::store_relaxed_system(there + static_cast<i64>(first_token) * top_k + pair, {group, weight});
        }
    }
#pragma unroll 1
    for (u32 step = blockIdx.x; step < steps; step += gridDim.x) {
        if (step != blockIdx.x) load(row, step);
        const u32 token = step / parts, column = step % parts * kColumns + thread * quantize::kEach;
        u32 wanted = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 1
        for (int slot = thread % 32, first = 0; first < top_k; slot += 32, first += 32) {
            const int at = slot < top_k ? place(topk_ids[static_cast<i64>(token) * top_k + slot]) : -1;
            wanted |= __reduce_or_sync(0xffffffff, at >= 0 ? 1u << (at >> 16) : 0);
        }
        const i64 row_there = static_cast<i64>(first_token) + token;
        u32 to = ranks.rank;
#pragma unroll 1
        for (u32 i = 0; i < ranks.num_ranks; ++i) {  // others first, and not all ranks the same one at once
            to = to + 1 == ranks.num_ranks ? 0 : to + 1;
            if ((wanted >> to & 1) == 0 || column >= h) continue;
            const RankMemory& memory = ranks.memory[to];
            ptx::store_relaxed_system(reinterpret_cast<uint4*>(memory.data + row_there * h + column), row.packed());
            u32* const scales = reinterpret_cast<u32*>(memory.scales) + row_there * (static_cast<u32>(h) / 128);
            if (thread % 8 == 0) ptx::store_relaxed_system(scales + column / 128, __float_as_uint(row.scale));
        }
    }
}
