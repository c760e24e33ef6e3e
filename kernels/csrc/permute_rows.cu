// Copies each token, quantized by whoever sent it, to all of its permuted rows: e4m3 with an fp32 scale per row and 128
// columns. What quantize_permute.cu does for tokens that are floats.
#include "permuted_rows.cuh"

constexpr int kWarps = 4;
constexpr int kEach = 16;  // columns per thread

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    permute_rows(const u8* __restrict__ tokens, u32 token_stride,  // e4m3 [num_tokens, k], rows 16-byte aligned
                 const float* __restrict__ token_scales,           // [num_tokens, k / 128]
                 u32 token_scale_stride, u32 block_stride,         // of token_scales
                 const int* inverse_permutation,                   // [num_tokens, top_k], -1: no row
                 int top_k, int k,
                 u8* __restrict__ data,                        // e4m3 [rows, k]
                 float* __restrict__ scales, u32 scale_stride  // [k / 128, scale_stride]
    ) {
    constexpr int kColumns = kWarps * 32 * kEach;  // per CTA; the CTAs of a token are neighbors
    const int parts = (k + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * kEach;
    uint4 columns = {};
    float scale = 0.0f;
    if (column < k) {
        columns = *reinterpret_cast<const uint4*>(tokens + token * token_stride + column);
        scale =
            token_scales[token * token_scale_stride + static_cast<i64>(column / floats::kScaleBlock) * block_stride];
    }
    ptx::grid_dependency_wait();  // inverse_permutation may not be complete yet; the tokens are
    ptx::launch_dependents();
    if (column >= k) return;
    PermutedRows rows;
    for (int first = 0; first < top_k; first += rows.kAtOnce) {
        rows.load(inverse_permutation + token * top_k + first, top_k - first);
        rows.write(columns, scale, column, k, data, scales, scale_stride);
    }
}
