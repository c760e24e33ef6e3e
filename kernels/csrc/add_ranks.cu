// Adds up what the ranks have returned for each of this rank's tokens, in fp32 and in the order of ranks. A rank
// without tokens waits for the others, too: its next call would overwrite what they still read.
#include "floats.cuh"
#include "ranks.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = kThreads * 8;  // of a token, per CTA and step
constexpr auto kDatatype = floats::DATATYPE;

extern "C" __global__ void __launch_bounds__(kThreads)
    add_ranks(const Ranks* ranks,
              const int* __restrict__ places,  // [num_experts]: rank * 65536 + group of each expert
              int num_experts,
              const int* __restrict__ topk_ids,  // [num_tokens, top_k]
              int num_tokens, int top_k, int n,
              void* __restrict__ out  // kDatatype [num_tokens, n]
    ) {
    extern __shared__ int place_of[];  // a copy of places
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < num_experts; i += kThreads) place_of[i] = places[i];
    const int parts = (n + kColumns - 1) / kColumns, steps = num_tokens * parts;
    const int num_ranks = static_cast<int>(ranks->num_ranks);
    const i64 max_own_tokens = static_cast<i64>(ranks->max_own_tokens);
    const u16* const sums = reinterpret_cast<const u16*>(ranks->own().partial_sums);
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    ranks->wait(COMBINE);  // which orders the copy, too
#pragma unroll 1
    for (int step = static_cast<int>(blockIdx.x); step < steps; step += static_cast<int>(gridDim.x)) {
        const i64 token = step / parts;
        const int column = step % parts * kColumns + static_cast<int>(threadIdx.x) * 8;
        u32 computed = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 1
        for (int slot = static_cast<int>(threadIdx.x) % 32, first = 0; first < top_k; slot += 32, first += 32) {
            const int id = slot < top_k ? topk_ids[token * top_k + slot] : -1;
            const bool valid = static_cast<u32>(id) < static_cast<u32>(num_experts);
            computed |= __reduce_or_sync(0xffffffff, valid && place_of[id] >= 0 ? 1u << (place_of[id] >> 16) : 0);
        }
        if (column >= n) continue;
        float sum[8] = {};
#pragma unroll 2
        for (int r = 0; r < num_ranks; ++r) {
            if ((computed >> r & 1) == 0) continue;
            float value[8];
            floats::load<floats::BF16>(value, sums, (r * max_own_tokens + token) * n + column);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += value[j];
        }
        floats::store<kDatatype>(out, token * n + column, sum);
    }
}
