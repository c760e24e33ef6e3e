// The weighted sum of a token's rows, in fp32 and in the order of its slots.
#include "floats.cuh"

constexpr int kAtOnce = 8;  // slots whose loads are under way

extern "C" __global__ void __launch_bounds__(256)
    combine_rows(const u16* values,                  // bf16 [rows, n]
                 const int* __restrict__ rows,       // [num_tokens, slots], -1: nothing to add
                 const float* __restrict__ weights,  // [num_tokens, slots]
                 int slots, int n,
                 void* __restrict__ out) {           // DATATYPE [num_tokens, n]
    constexpr int kColumns = 256 * 8;  // of a CTA; those of a token follow each other
    const int parts = (n + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * 8;
    float sum[8] = {};
    rows += token * slots;
    weights += token * slots;
    for (int first = 0; first < slots; first += kAtOnce) {
        i64 row[kAtOnce];
        float weight[kAtOnce];
        uint4 packed[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const bool there = first + i < slots && column < n;
            row[i] = there ? rows[first + i] : -1;
            weight[i] = row[i] >= 0 ? weights[first + i] : 0.0f;
        }
        if (first == 0) {  // rows and weights are older than the launch before, values are not
            ptx::wait_for_launches_before();
            ptx::let_next_launch_begin();
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            packed[i] = {0, 0, 0, 0};
            if (row[i] >= 0) packed[i] = *reinterpret_cast<const uint4*>(values + row[i] * n + column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float value[8];
            floats::unpack<true>(value, packed[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += weight[i] * value[j];
        }
    }
    if (column < n) floats::store<DATATYPE>(out, token * n + column, sum);
}
