// The weighted sum of each token's permuted rows, in fp32 and in the order of its slots. With CALLS, the outputs go to
// the callers, in bf16, and the last CTA answers them.
#include "floats.cuh"
#if CALLS
#include "device_calls.cuh"
#endif

constexpr int kAtOnce = 8;  // slots whose loads are in flight together
constexpr bool kBiased = BIASED;
constexpr auto kDatatype = floats::DATATYPE;
constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    unpermute_rows(const u16* rows,                              // bf16 [rows, n]
                   const int* __restrict__ inverse_permutation,  // [num_tokens, top_k], -1: nothing to add
                   const float* __restrict__ topk_weights,       // [num_tokens, top_k]
                   int top_k, int n,
#if BIASED
                   const int* __restrict__ topk_ids,  // groups [num_tokens, top_k]
                   const u16* __restrict__ bias,      // bf16 [num_groups, n], added to each of a group's rows
#endif
#if CALLS
                   const RequestTable* table, CallStep* step
#else
                   void* __restrict__ out  // kDatatype [num_tokens, n]
#endif
    ) {
    constexpr int kColumns = kThreads * 8;  // per CTA; the CTAs of a token are neighbors
    const int parts = (n + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * 8;
#if CALLS
    __shared__ Request found;
    const CallAnswers answers(step);
    const bool is_padding = !table->find_here<kThreads>(found, static_cast<int>(token));
#endif
    float sum[8] = {};
    inverse_permutation += token * top_k;
    topk_weights += token * top_k;
#if BIASED
    topk_ids += token * top_k;
#endif
    for (int first = 0; first < top_k; first += kAtOnce) {
        i64 row[kAtOnce];
        float weight[kAtOnce];
        uint4 packed[kAtOnce], packed_bias[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const bool valid = first + i < top_k && column < n;
            row[i] = valid ? inverse_permutation[first + i] : -1;
            weight[i] = row[i] >= 0 ? topk_weights[first + i] : 0.0f;
#if BIASED
            packed_bias[i] = {0, 0, 0, 0};
            if (row[i] >= 0)
                packed_bias[i] =
                    *reinterpret_cast<const uint4*>(bias + static_cast<i64>(topk_ids[first + i]) * n + column);
#endif
        }
        if (first == 0) {  // all but `rows` was complete before the preceding launch began
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            packed[i] = {0, 0, 0, 0};
            if (row[i] >= 0) packed[i] = *reinterpret_cast<const uint4*>(rows + row[i] * n + column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float value[8];
            floats::unpack<true>(value, packed[i]);
            if constexpr (kBiased) {
                float added[8];
                floats::unpack<true>(added, packed_bias[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) value[j] += added[j];
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += weight[i] * value[j];
        }
    }
#if CALLS
    const i64 row = token - static_cast<int>(found.first_token);
    if (column < n && !is_padding) floats::store<kDatatype>(reinterpret_cast<void*>(found.out), row * n + column, sum);
    answers.write();
#else
    if (column < n) floats::store<kDatatype>(out, token * n + column, sum);
#endif
}
