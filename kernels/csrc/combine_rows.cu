// The weighted sum of a token's rows, in fp32 and in the order of its slots.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    combine_rows(const u16* __restrict__ values,   // bf16 [rows, n]
                 const int* __restrict__ rows,     // [num_tokens, slots], -1: nothing to add
                 const float* __restrict__ weights,  // [num_tokens, slots]
                 int slots, int n,
                 float* __restrict__ out) {        // [num_tokens, n]
    const int column = (blockIdx.y * 256 + threadIdx.x) * 8;
    const i64 token = blockIdx.x;
    if (column >= n) return;
    float sum[8] = {};
#pragma unroll 4
    for (int slot = 0; slot < slots; ++slot) {
        const i64 row = rows[token * slots + slot];
        if (row < 0) continue;
        const float weight = weights[token * slots + slot];
        const uint4 packed = *reinterpret_cast<const uint4*>(values + row * n + column);
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[2 * i] += weight * ptx::to_float<true>(words[i]);
            sum[2 * i + 1] += weight * ptx::to_float<true>(words[i] >> 16);
        }
    }
    float4* const to = reinterpret_cast<float4*>(out + token * n + column);
    to[0] = {sum[0], sum[1], sum[2], sum[3]};
    to[1] = {sum[4], sum[5], sum[6], sum[7]};
}
