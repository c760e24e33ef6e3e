// Gathers a step's tokens, and the routing that its requests supply, from where each request has them: pinned host
// memory, or the memory of any GPU that this one can read. One CTA per token.
#include "request_table.cuh"

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // loads per thread in flight: a read of host memory takes more than a microsecond

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_rows(const RequestTable* table, int h, int top_k, int num_experts,
                uint4* __restrict__ hidden_states,  // bf16 [num_tokens, h]
                int* __restrict__ topk_ids,         // [num_tokens, top_k], -1: no expert; null if the layer routes
                float* __restrict__ topk_weights    // [num_tokens, top_k]
    ) {
    __shared__ Request found;
    const int token = blockIdx.x, thread = threadIdx.x, loads = h / 8;
    const i64 place = static_cast<i64>(token) * top_k + thread;
    if (!table->find(found, token)) {
        ptx::grid_dependency_wait();
        ptx::launch_dependents();
        if (topk_ids != nullptr && thread < top_k) topk_ids[place] = -1;
        return;
    }
    const i64 row = token - static_cast<int>(found.first_token);
    const uint4* const from = reinterpret_cast<const uint4*>(found.hidden_states) + row * loads;
    uint4* const to = hidden_states + static_cast<i64>(token) * loads;
    int id = 0;
    float weight = 0.0f;
    if (topk_ids != nullptr && thread < top_k) {
        const i64 given = row * top_k + thread;
        const i64 wide = found.has_int64_ids ? reinterpret_cast<const i64*>(found.topk_ids)[given]
                                             : reinterpret_cast<const int*>(found.topk_ids)[given];
        id = static_cast<u64>(wide) < static_cast<u64>(num_experts) ? static_cast<int>(wide) : -1;
        weight = reinterpret_cast<const float*>(found.topk_weights)[given];
    }
    for (int first = thread; first < loads; first += kThreads * kAtOnce) {
        uint4 loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (first + i * kThreads < loads) loaded[i] = from[first + i * kThreads];
        if (first == thread) ptx::grid_dependency_wait();  // nothing that precedes this launch writes the requests
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (first + i * kThreads < loads) to[first + i * kThreads] = loaded[i];
    }
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    if (topk_ids != nullptr && thread < top_k) {
        topk_ids[place] = id;
        topk_weights[place] = weight;
    }
}
