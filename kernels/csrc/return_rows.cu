// The weighted sum of each token's permuted rows on this rank, in fp32 and in the order of its slots, written as bf16 to
// the rank whose token it is. A token without a row here is left out.
#include "floats.cuh"
#include "ranks.cuh"

constexpr int kAtOnce = 8;  // slots whose loads are in flight together

extern "C" __global__ void __launch_bounds__(256)
    return_rows(Ranks* ranks,
                const int* __restrict__ first_tokens,         // [num_ranks + 1]
                const u16* rows,                              // bf16 [rows, n]
                const int* __restrict__ inverse_permutation,  // [num_tokens, top_k] of all ranks, -1: nothing to add
                int num_tokens, int top_k, int n) {
    constexpr int kColumns = 256 * 8;  // per CTA; the CTAs of a token are neighbors
    const int parts = (n + kColumns - 1) / kColumns;
    const int token = static_cast<int>(blockIdx.x) / parts;
    const int column = static_cast<int>(blockIdx.x) % parts * kColumns + static_cast<int>(threadIdx.x) * 8;
    const float* const topk_weights = reinterpret_cast<const float*>(ranks->own().topk_weights);
    float sum[8] = {};
    bool any = false;
    const i64 pairs = static_cast<i64>(token) * top_k;
    for (int first = 0; first < top_k; first += kAtOnce) {
        i64 row[kAtOnce];
        float weight[kAtOnce];
        uint4 packed[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const bool valid = first + i < top_k && token < num_tokens;
            row[i] = valid ? inverse_permutation[pairs + first + i] : -1;
            weight[i] = row[i] >= 0 ? topk_weights[pairs + first + i] : 0.0f;
            any = any || row[i] >= 0;
        }
        if (first == 0) {  // all but `rows` was complete before the preceding launch began
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            packed[i] = {0, 0, 0, 0};
            if (row[i] >= 0 && column < n) packed[i] = *reinterpret_cast<const uint4*>(rows + row[i] * n + column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float value[8];
            floats::unpack<true>(value, packed[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += weight[i] * value[j];
        }
    }
    if (any && column < n) {
        int owner = 0;
        while (token >= first_tokens[owner + 1]) ++owner;
        const i64 place = static_cast<i64>(ranks->rank) * static_cast<i64>(ranks->max_own_tokens) +
                          (token - first_tokens[owner]);
        floats::store<floats::BF16>(reinterpret_cast<void*>(ranks->memory[owner].partial_sums), place * n + column, sum);
    }
    ranks->announce(COMBINE, gridDim.x);
}
