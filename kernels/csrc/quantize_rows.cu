// Quantises each token once, and writes it to all of its rows: e4m3 with an fp32 scale per row and 128 columns.
//
// A warp has 128 columns of a token; the arithmetic is that of kernels/quantize.py, bit for bit.
#include "ptx.cuh"

#define BF16 0
#define FP16 1
#define FP32 2

constexpr int kWarps = 4;

// Four consecutive numbers of a row.
__device__ __forceinline__ float4 load(const void* from, i64 index) {
#if DATATYPE == FP32
    return *(reinterpret_cast<const float4*>(static_cast<const float*>(from) + index));
#else
    const uint2 packed = *reinterpret_cast<const uint2*>(static_cast<const u16*>(from) + index);
    return {ptx::to_float<DATATYPE == BF16>(packed.x), ptx::to_float<DATATYPE == BF16>(packed.x >> 16),
            ptx::to_float<DATATYPE == BF16>(packed.y), ptx::to_float<DATATYPE == BF16>(packed.y >> 16)};
#endif
}

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    quantize_rows(const void* __restrict__ hidden_states,  // [num_tokens, k], contiguous
                  const int* __restrict__ rows,            // [num_tokens, slots], -1: nowhere
                  int slots, int k,
                  u8* __restrict__ data,                   // e4m3 [rows, k]
                  float* __restrict__ scales, u32 scale_stride) {  // [k / 128, scale_stride]
    const int lane = threadIdx.x % 32, block = blockIdx.y * kWarps + threadIdx.x / 32;
    const i64 token = blockIdx.x;
    if (block * 128 >= k) return;
    const int column = block * 128 + lane * 4;
    const float4 x = load(hidden_states, token * k + column);
    float most = ptx::max_or_nan(ptx::max_or_nan(fabsf(x.x), fabsf(x.y)), ptx::max_or_nan(fabsf(x.z), fabsf(x.w)));
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
        most = ptx::max_or_nan(most, __shfl_xor_sync(0xffffffff, most, distance));
    const float scale = ptx::max_or_nan(most, 448.0f * 1.17549435e-38f) * (1.0f / 448.0f);
    const u32 packed = ptx::pack_e4m3(__fdiv_rn(x.x, scale), __fdiv_rn(x.y, scale)) |
                       static_cast<u32>(ptx::pack_e4m3(__fdiv_rn(x.z, scale), __fdiv_rn(x.w, scale))) << 16;
    for (int slot = 0; slot < slots; ++slot) {
        const i64 row = rows[token * slots + slot];
        if (row < 0) continue;
        *reinterpret_cast<u32*>(data + row * k + column) = packed;
        if (lane == 0) scales[static_cast<i64>(block) * scale_stride + row] = scale;
    }
}
