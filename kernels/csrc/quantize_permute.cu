// Quantizes each token once and writes it to all of its permuted rows: e4m3 with an fp32 scale per row and 128 columns.
// With CALLS, tokens are read where the callers' GPUs have written them.
#include "permuted_rows.cuh"
#include "quantize.cuh"
#if CALLS
#include "request_table.cuh"
#endif

constexpr int kWarps = 4;
constexpr auto kDatatype = floats::DATATYPE;

extern "C" __global__ void __launch_bounds__(kWarps * 32) quantize_permute(
#if CALLS
    const RequestTable* table,
#else
    const void* __restrict__ hidden_states,  // [num_tokens, k], contiguous
#endif
    const int* inverse_permutation,  // [num_tokens, top_k], -1: no row
    int top_k, int k,
    u8* __restrict__ data,                        // e4m3 [rows, k]
    float* __restrict__ scales, u32 scale_stride  // [ceil(k / 128), scale_stride]
) {
    constexpr int kColumns = kWarps * 32 * quantize::kEach;  // per CTA; the CTAs of a token are neighbors
    const int parts = (k + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * quantize::kEach;
    quantize::Row tokens;
#if CALLS
    __shared__ Request found;
    const bool is_padding = !table->find_here<kWarps * 32>(found, static_cast<int>(token));
    const i64 row = token - static_cast<int>(found.first_token);
    tokens.load_of_other_gpus(reinterpret_cast<const u16*>(found.hidden_states), row * k + column,
                              column < k && !is_padding);
#else
    tokens.load<kDatatype>(hidden_states, token * k + column, column < k);
#endif
    ptx::grid_dependency_wait();  // inverse_permutation may not be complete yet; the tokens are
    ptx::launch_dependents();
    if (column >= k) return;
    PermutedRows rows;
    for (int first = 0; first < top_k; first += rows.kAtOnce) {
        rows.load(inverse_permutation + token * top_k + first, top_k - first);
        rows.write(tokens.packed(), tokens.scale, column, k, data, scales, scale_stride);
    }
}
