// Copies each received token to all of its permuted rows.
#include "ptx.cuh"

constexpr int kThreads = 128;
constexpr int kEach = 16;   // columns per thread
constexpr int kAtOnce = 8;  // slots whose rows are looked up together

extern "C" __global__ void __launch_bounds__(kThreads)
    expand_rows(const u8* __restrict__ received,            // e4m3 [num_tokens, k]; undefined without a row here
                const float* __restrict__ received_scales,  // [num_tokens, k / 128]
                const int* inverse_permutation,             // [num_tokens, top_k], -1: no row
                int top_k, int k,
                u8* __restrict__ data,                        // e4m3 [rows, k]
                float* __restrict__ scales, u32 scale_stride  // [k / 128, scale_stride]
    ) {
    constexpr int kColumns = kThreads * kEach;  // per CTA; the CTAs of a token are neighbors
    const int parts = (k + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * kEach;
    uint4 columns = {0, 0, 0, 0};
    float scale = 0.0f;
    if (column < k) {
        columns = *reinterpret_cast<const uint4*>(received + token * k + column);
        scale = received_scales[token * (k / 128) + column / 128];
    }
    ptx::grid_dependency_wait();  // inverse_permutation may not be complete yet; what was received is
    ptx::launch_dependents();
    if (column >= k) return;
    inverse_permutation += token * top_k;
    for (int first = 0; first < top_k; first += kAtOnce) {
        i64 row[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) row[i] = first + i < top_k ? inverse_permutation[first + i] : -1;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (row[i] < 0) continue;
            *reinterpret_cast<uint4*>(data + row[i] * k + column) = columns;
            if (threadIdx.x % 8 == 0) scales[static_cast<i64>(column / 128) * scale_stride + row[i]] = scale;
        }
    }
}
