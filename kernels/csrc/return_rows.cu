// The weighted sum of each token's permuted rows on this rank, in fp32 and in the order of its slots, written as bf16
// to the rank whose token it is. A token without a row here is left out.
#include "floats.cuh"
#include "ranks.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = kThreads * 8;  // of a token, per CTA and step
constexpr int kAtOnce = 8;              // slots whose loads are in flight together

// A token's rows and their weights, up to kAtOnce of them.
struct Slots {
    int row[kAtOnce];
    float weight[kAtOnce];

    __device__ __forceinline__ void load(const int* inverse_permutation, const float* topk_weights, i64 first,
                                         int count) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            row[i] = i < count ? inverse_permutation[first + i] : -1;
            weight[i] = row[i] >= 0 ? topk_weights[first + i] : 0.0f;
        }
    }

    __device__ __forceinline__ bool any() const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) found = found || row[i] >= 0;
        return found;
    }

    __device__ __forceinline__ void add(float (&sum)[8], const u16* rows, i64 n, i64 column) const {
        uint4 packed[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            packed[i] = {0, 0, 0, 0};
            if (row[i] >= 0) packed[i] = *reinterpret_cast<const uint4*>(rows + row[i] * n + column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float value[8];
            floats::unpack<true>(value, packed[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] += weight[i] * value[j];
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    return_rows(Ranks* ranks,
                const int* __restrict__ first_tokens,         // [kMaxRanks + 1]
                const u16* rows,                              // bf16 [rows, n]
                const int* __restrict__ inverse_permutation,  // [num_tokens, top_k] of all ranks, -1: nothing to add
                int num_tokens, int top_k, int n) {
    __shared__ Ranks copy;
    __shared__ int firsts[kMaxRanks + 1];
    const int thread = static_cast<int>(threadIdx.x);
    static_assert(sizeof(Ranks) / 4 <= kThreads);
    if (const int i = thread; i < static_cast<int>(sizeof(Ranks) / 4))
        reinterpret_cast<u32*>(&copy)[i] = reinterpret_cast<const u32*>(ranks)[i];
    if (thread <= kMaxRanks) firsts[thread] = first_tokens[thread];
    __syncthreads();
    // Tokens of all ranks in turn, so that all links and the own memory are busy all the time.
    const int num_ranks = static_cast<int>(copy.num_ranks), parts = (n + kColumns - 1) / kColumns;
    int most = 0;  // tokens of a rank
#pragma unroll 1
    for (int r = 0; r < num_ranks; ++r) most = max(most, firsts[r + 1] - firsts[r]);
    const int steps = most * num_ranks * parts;
    const float* const topk_weights = reinterpret_cast<const float*>(copy.own().topk_weights);
    bool waited = false;
#pragma unroll 1
    for (int step = static_cast<int>(blockIdx.x); step < steps; step += static_cast<int>(gridDim.x)) {
        const int owner = (step / parts + static_cast<int>(copy.rank) + 1) % num_ranks;
        const int own_token = step / parts / num_ranks, token = firsts[owner] + own_token;
        const int column = step % parts * kColumns + thread * 8;
        if (token >= firsts[owner + 1]) continue;
        const i64 pairs = static_cast<i64>(token) * top_k;
        float sum[8] = {};
        bool any = false;
#pragma unroll 1
        for (int first = 0; first < top_k; first += kAtOnce) {
            Slots slots;
            slots.load(inverse_permutation, topk_weights, pairs + first, top_k - first);
            any = any || slots.any();
            if (!waited) {  // all but `rows` was complete before the preceding launch began
                ptx::grid_dependency_wait();
                ptx::launch_dependents();
                waited = true;
            }
            if (column < n) slots.add(sum, rows, n, column);
        }
        if (any && column < n) {
            const i64 place = static_cast<i64>(copy.rank) * static_cast<i64>(copy.max_own_tokens) + own_token;
            u16* const sums = reinterpret_cast<u16*>(copy.memory[owner].partial_sums) + place * n + column;
            ptx::store_relaxed_system(reinterpret_cast<uint4*>(sums), floats::pack<true>(sum));
        }
    }
    if (!waited) {
        ptx::grid_dependency_wait();
        ptx::launch_dependents();
    }
    __shared__ bool is_last;
    __syncthreads();
    __threadfence();  // the CTA's reads come first
    if (thread == 0) is_last = atomicAdd(&ranks->done, 1) == gridDim.x - 1;
    __syncthreads();
    if (is_last) {
        if (thread == 0) ranks->done = 0;
        copy.announce(CONSUMED);
    }
}
