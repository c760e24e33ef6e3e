// Copies each token that arrives to all of its permuted rows on this rank.
#include "permuted_rows.cuh"
#include "ranks.cuh"

constexpr int kThreads = 128;
constexpr int kEach = 16;  // columns per thread

extern "C" __global__ void __launch_bounds__(kThreads)
    expand_rows(const Ranks* ranks,
                const int* __restrict__ first_tokens,  // [kMaxRanks + 1]: rank r has those from first_tokens[r] on
                u8* received,                          // e4m3 [max_tokens, k], of this rank's memory
                u32* received_scales,                  // fp32 [max_tokens, k / 128]
                const int* inverse_permutation,        // [num_tokens, top_k], -1: no row
                int num_ranks, int top_k, int k,
                u8* __restrict__ data,                        // e4m3 [rows, k]
                float* __restrict__ scales, u32 scale_stride  // [k / 128, scale_stride]
    ) {
    constexpr int kColumns = kThreads * kEach;  // per CTA; the CTAs of a token are neighbors
    const int parts = (k + kColumns - 1) / kColumns;
    const int column = blockIdx.x % parts * kColumns + threadIdx.x * kEach;
    const int source = blockIdx.x / parts % num_ranks;  // all ranks in turn, as tokens arrive
    const i64 token = first_tokens[source] + blockIdx.x / parts / num_ranks;
    const bool valid = token < first_tokens[source + 1] && column < k;
    uint4* const place = reinterpret_cast<uint4*>(received + token * k + column);
    u32* const scale_place = received_scales + token * (k / 128) + column / 128;
    const u64 until = ranks->until();
    uint4 columns = {};
    u32 scale = 0;
    if (valid) {
        columns = ptx::load_relaxed_system(place);
        scale = ptx::load_relaxed_system(scale_place);
    }
    ptx::grid_dependency_wait();  // inverse_permutation may not be complete yet
    ptx::launch_dependents();
    if (!valid) return;
    bool is_here = false;
    PermutedRows rows;
    for (int first = 0; first < top_k; first += rows.kAtOnce) {
        rows.load(inverse_permutation + token * top_k + first, top_k - first);
        if (!is_here && rows.any()) {  // else it does not come to this rank
            is_here = true;
            columns = ranks->wait_for(columns, place, source, until);
            *place = {kNothing, kNothing, kNothing, kNothing};
            if (threadIdx.x % 8 == 0) {
                scale = ranks->wait_for(scale, scale_place, source, until);
                *scale_place = kNothing;
            }
        }
        rows.write(columns, __uint_as_float(scale), column, k, data, scales, scale_stride);
    }
}
