// Adds up what the ranks return for each of this rank's tokens, in fp32 and in the order of ranks, as it arrives.
#include "floats.cuh"
#include "ranks.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = kThreads * 8;  // of a token, per CTA and step
constexpr int kAtOnce = 4;              // ranks whose sums are loaded together
constexpr auto kDatatype = floats::DATATYPE;

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    add_ranks(const Ranks* ranks_in_memory,
              const int* __restrict__ places,  // [num_experts]: rank * 65536 + group of each expert
              int num_experts,
              const int* __restrict__ topk_ids,  // [num_tokens, top_k]
              int num_tokens, int top_k, int n,
              void* __restrict__ out  // kDatatype [num_tokens, n]
    ) {
    // The launch begins once the preceding one is on all SMs, when the ones before that are complete.
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;
    const int thread = static_cast<int>(threadIdx.x);
    static_assert(sizeof(Ranks) / 4 <= kThreads);
    if (thread < static_cast<int>(sizeof(Ranks) / 4))
        reinterpret_cast<u32*>(&ranks)[thread] = reinterpret_cast<const u32*>(ranks_in_memory)[thread];
#pragma unroll 1
    for (int i = thread; i < num_experts; i += kThreads) place_of[i] = places[i];
    ptx::launch_dependents();
    __syncthreads();
    const int parts = (n + kColumns - 1) / kColumns, steps = num_tokens * parts;
    u16* const sums = reinterpret_cast<u16*>(ranks.own().partial_sums);
    const u64 until = ptx::global_nanoseconds() + ranks.timeout;
#pragma unroll 1
    for (int step = static_cast<int>(blockIdx.x); step < steps; step += static_cast<int>(gridDim.x)) {
        const i64 token = step / parts;
        const int column = step % parts * kColumns + thread * 8;
        u32 computed = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 1
        for (int slot = thread % 32, first = 0; first < top_k; slot += 32, first += 32) {
            const int id = slot < top_k ? topk_ids[token * top_k + slot] : -1;
            const int at = static_cast<u32>(id) < static_cast<u32>(num_experts) ? place_of[id] : -1;
            computed |= __reduce_or_sync(0xffffffff, at >= 0 ? 1u << (at >> 16) : 0);
        }
        if (column >= n) continue;
        float sum[8] = {};
#pragma unroll 1
        for (u32 first = 0; first < ranks.num_ranks; first += kAtOnce) {
            uint4 four[kAtOnce];
            uint4* place[kAtOnce];
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                const i64 row = (first + i) * static_cast<i64>(ranks.max_own_tokens) + token;
                place[i] = reinterpret_cast<uint4*>(sums + row * n + column);
                four[i] = {0, 0, 0, 0};
                if (computed >> (first + i) & 1) four[i] = ptx::load_relaxed_system(place[i]);
            }
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                if ((computed >> (first + i) & 1) == 0) continue;
                float value[8];
                floats::unpack<true>(value, ranks.wait_for(four[i], place[i], first + i, until));
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += value[j];
                *place[i] = {kNothing, kNothing, kNothing, kNothing};
            }
        }
        floats::store<kDatatype>(out, token * n + column, sum);
    }
    ptx::grid_dependency_wait();  // a launch must not end before those that it follows
}
