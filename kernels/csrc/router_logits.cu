// A router's logits: bf16 tokens times bf16 weights, summed in fp32. The order depends on K alone, so logits are
// batch-invariant: 256 columns in the tensor cores, four such sums one after another, then the partial sums of every
// 1024 columns. route_tokens.cu adds up the partial sums that this kernel leaves. In a decode step the weights are cold
// and no other launch overlaps the fetch, which many CTAs therefore share, one sum each. With many tokens a CTA
// computes four sums in turn and leaves fewer partial sums.
#include "wgmma.cuh"

constexpr int kTokens = TOKENS, kExperts = EXPERTS;  // per CTA, which is one warpgroup
constexpr int kRowBytes = 128;                       // of a swizzled box
constexpr int kColumns = kRowBytes / 2;              // of a box
constexpr int kBoxes = SUM_COLUMNS / kColumns;       // side by side in a sum

struct Storage {
    u8 weights[kBoxes][kExperts * kRowBytes];
    u8 tokens[kBoxes][kTokens * kRowBytes];
    u64 full[kBoxes];
};
static_assert(kTokens == 64 && sizeof(Storage) == STORAGE_BYTES);

// d += A[64 x 64] * B[N x 64]^T of bf16, committed as one group.
template <int kN>
__device__ __forceinline__ void add_block(float (&d)[kN / 2], wgmma::Descriptor a, wgmma::Descriptor b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int bytes = 0; bytes < 128; bytes += 32) wgmma::Multiply<kN, true>::add(d, a + bytes, b + bytes);
    ptx::wgmma_commit();
}

extern "C" __global__ void __launch_bounds__(128)
    router_logits(const __grid_constant__ ptx::TensorMap token_map,   // bf16 [num_tokens, k]
                  const __grid_constant__ ptx::TensorMap weight_map,  // bf16 [num_experts, k], not written by the
                                                                      // preceding launch
                  int num_tokens, int num_experts,
                  int parts,                  // partial sums of a logit
                  int sums,                   // of kBoxes boxes, in each part
                  float* __restrict__ logits  // [parts, num_tokens, num_experts]
    ) {
    extern __shared__ __align__(1024) u8 raw[];
    Storage& shared = *reinterpret_cast<Storage*>(raw);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int columns = (num_experts + kExperts - 1) / kExperts, part = blockIdx.x % parts;
    const int expert = blockIdx.x / parts % columns * kExperts, token = blockIdx.x / parts / columns * kTokens;
    const int boxes = sums * kBoxes;
    const auto load_weights = [&](int box) {  // out of bounds: zeros
        u64* const full = &shared.full[box % kBoxes];
        ptx::mbarrier_arrive_expect_bytes(full, (kExperts + kTokens) * kRowBytes);
        ptx::tma_load(&weight_map, full, shared.weights[box % kBoxes], (part * boxes + box) * kColumns, expert);
    };
    const auto load_tokens = [&](int box) {
        ptx::tma_load(&token_map, &shared.full[box % kBoxes], shared.tokens[box % kBoxes],
                      (part * boxes + box) * kColumns, token);
    };
    if (thread == 0) {
        for (u64& full : shared.full) ptx::mbarrier_init(&full, 1);
        ptx::fence_mbarrier_init();
        for (int box = 0; box < kBoxes; ++box) load_weights(box);
    }
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    if (thread == 0)
        for (int box = 0; box < kBoxes; ++box) load_tokens(box);
    __syncthreads();

    float total[kExperts / 2] = {};
    const auto a = wgmma::Descriptor::of(shared.tokens[0]), b = wgmma::Descriptor::of(shared.weights[0]);
#pragma unroll 1
    for (int first = 0; first < boxes; first += kBoxes) {
        float sum[kExperts / 2] = {};
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
            ptx::mbarrier_wait(&shared.full[box], first / kBoxes & 1);
            add_block<kExperts>(sum, a + box * sizeof(shared.tokens[0]), b + box * sizeof(shared.weights[0]));
            if (first + kBoxes < boxes) {
                wgmma::wait(sum);
                __syncthreads();  // all warps are done with the box
                if (thread == 0) {
                    load_weights(first + kBoxes + box);
                    load_tokens(first + kBoxes + box);
                }
            }
        }
        wgmma::wait(sum);
#pragma unroll
        for (int i = 0; i < kExperts / 2; ++i) total[i] += sum[i];
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = token + warp * 16 + lane / 4 + half * 8;
        if (row >= num_tokens) continue;
        float* const out = logits + (static_cast<i64>(part) * num_tokens + row) * num_experts;
#pragma unroll
        for (int i = 0; i < kExperts / 8; ++i) {
            const int column = expert + i * 8 + lane % 4 * 2;
            const float low = total[i * 4 + half * 2], high = total[i * 4 + half * 2 + 1];
            if (num_experts % 2 == 0) {
                if (column < num_experts) *reinterpret_cast<float2*>(out + column) = {low, high};
            } else {
                if (column < num_experts) out[column] = low;
                if (column + 1 < num_experts) out[column + 1] = high;
            }
        }
    }
}
