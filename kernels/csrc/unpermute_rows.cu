// The weighted sum of each token's permuted rows, in fp32 and in the order of its slots.
#include "slots.cuh"

constexpr auto kDatatype = floats::DATATYPE;

extern "C" __global__ void __launch_bounds__(256)
    unpermute_rows(const u16* rows,                              // bf16 [rows, n]
                   const int* __restrict__ inverse_permutation,  // [num_tokens, top_k], -1: nothing to add
                   const float* __restrict__ topk_weights,       // [num_tokens, top_k]
                   int top_k, int n,
                   void* __restrict__ out  // kDatatype [num_tokens, n]
    ) {
    constexpr int kColumns = 256 * 8;  // per CTA; the CTAs of a token are neighbors
    const int parts = (n + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts, pairs = token * top_k;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * 8;
    float sum[8] = {};
    Slots slots;
    for (int first = 0; first < top_k; first += slots.kAtOnce) {
        slots.load(inverse_permutation + pairs + first, topk_weights + pairs + first, 1,
                   column < n ? top_k - first : 0);
        if (first == 0) {  // all but `rows` was complete before the preceding launch began
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
        }
        slots.add(sum, rows, n, column);
    }
    if (column < n) floats::store<kDatatype>(out, token * n + column, sum);
}
