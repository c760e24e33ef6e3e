// Quantizes each token once and writes it to all of its permuted rows: e4m3 with an fp32 scale per row and 128 columns.
//
// Eight lanes share a scale's 128 columns of a token; the arithmetic is that of kernels/ops/quantize.py, bit for bit.
#include "floats.cuh"

constexpr int kWarps = 4;
constexpr int kEach = 16;   // columns per lane
constexpr int kAtOnce = 8;  // slots whose rows are looked up together
constexpr auto kDatatype = floats::DATATYPE;

// Division rounded as by IEEE 754 (Markstein's correction), except for quotients so small that they are zero in FP8.
struct Divider {
    const float scale, reciprocal;
    __device__ __forceinline__ explicit Divider(float by) : scale(by), reciprocal(__frcp_rn(by)) {}
    __device__ __forceinline__ float operator()(float x) const {
        const float quotient = x * reciprocal;
        return reciprocal > 0.0f ? fmaf(fmaf(-quotient, scale, x), reciprocal, quotient) : quotient;
    }
};

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    quantize_permute(const void* __restrict__ hidden_states,  // [num_tokens, k], contiguous
                     const int* inverse_permutation,          // [num_tokens, top_k], -1: no row
                     int top_k, int k,
                     u8* __restrict__ data,                        // e4m3 [rows, k]
                     float* __restrict__ scales, u32 scale_stride  // [k / 128, scale_stride]
    ) {
    constexpr int kColumns = kWarps * 32 * kEach;  // per CTA; the CTAs of a token are neighbors
    const int parts = (k + kColumns - 1) / kColumns;
    const i64 token = blockIdx.x / parts;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * kEach;
    float x[kEach] = {};
    if (column < k) floats::load<kDatatype>(x, hidden_states, token * k + column);
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) amax = ptx::max_or_nan(amax, fabsf(x[i]));
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
        amax = ptx::max_or_nan(amax, __shfl_xor_sync(0xffffffff, amax, distance));
    const float scale = floats::e4m3_scale(amax);
    const Divider divide(scale);
    u32 packed[kEach / 4];
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
        const float* four = x + i * 4;
        packed[i] = ptx::pack_e4m3(divide(four[0]), divide(four[1])) |
                    static_cast<u32>(ptx::pack_e4m3(divide(four[2]), divide(four[3]))) << 16;
    }
    ptx::grid_dependency_wait();  // inverse_permutation may not be complete yet; the tokens are
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
            *reinterpret_cast<uint4*>(data + row[i] * k + column) = {packed[0], packed[1], packed[2], packed[3]};
            if (threadIdx.x % 8 == 0) scales[static_cast<i64>(column / 128) * scale_stride + row[i]] = scale;
        }
    }
}
