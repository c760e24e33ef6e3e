// A token's experts and their weights out of its logits, by the rules of kernels/ops/router.py: a CTA for each token.
//
// In a decode step the weights have pushed this code out of the L2 cache, and fetching it takes longer than running it:
// a pass without logits fetches it while the launch before computes them. Loops are hardly unrolled for the same reason.
#include "ptx.cuh"

constexpr int kWarps = 4, kThreads = kWarps * 32;

// Larger numbers have larger ones; zeros are alike, and NaN is larger than any, as in a sort. Never 0.
__device__ __forceinline__ u32 order(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? 0xffffffff : bits >> 31 ? ~bits : bits | 0x80000000;
}
// The number that has it.
__device__ __forceinline__ float number(u32 order) { return __uint_as_float(order >> 31 ? order ^ 0x80000000 : ~order); }

__device__ __forceinline__ float sum_of_warp(float value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}
__device__ __forceinline__ float max_of_warp(float value) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = ptx::max_or_nan(value, __shfl_xor_sync(0xffffffff, value, distance));
    return value;
}

// A token's logits: four sums or one for every part, added up as router_logits.cu does it for many tokens.
__device__ __forceinline__ void add_up(float* scores, const float* logits, int parts, int sums, i64 stride, int count) {
    constexpr int kParts = 8, kSums = SUMS;  // that a thread loads together
    static_assert(kSums == 4);
    if (count % 2 == 0) {
#pragma unroll 1
        for (int e = threadIdx.x * 2; e < count; e += kThreads * 2) {
            const float* place = logits + e;
            float2 total = {0.0f, 0.0f};
#pragma unroll 1
            for (int left = parts; left > 0; left -= kParts) {
                float2 loaded[kParts][kSums] = {};
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
#pragma unroll
                    for (int sum = 0; sum < kSums; ++sum) {
                        if (part >= left || sum >= sums) continue;
                        loaded[part][sum] = *reinterpret_cast<const float2*>(place);
                        place += stride;
                    }
                }
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    const float2* const of = loaded[part];
                    total.x += of[0].x + of[1].x + of[2].x + of[3].x;
                    total.y += of[0].y + of[1].y + of[2].y + of[3].y;
                }
            }
            *reinterpret_cast<float2*>(scores + e) = total;
        }
    } else {
#pragma unroll 1
        for (int e = threadIdx.x; e < count; e += kThreads) {
            const float* place = logits + e;
            float total = 0.0f;
#pragma unroll 1
            for (int part = 0; part < parts; ++part) {
                float sum = 0.0f;
#pragma unroll 1
                for (int i = 0; i < sums; ++i, place += stride) sum += *place;
                total += sum;
            }
            scores[e] = total;
        }
    }
}

// scores: logits on the way in, their softmax on the way out.
__device__ __forceinline__ void softmax_of(float* scores, float (&of_warps)[2][kWarps], int count) {
    const int warp = threadIdx.x / 32;
    float most = __int_as_float(0xff800000), sum = 0.0f;  // minus infinity
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += kThreads) most = ptx::max_or_nan(most, scores[e]);
    of_warps[0][warp] = max_of_warp(most);
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) most = ptx::max_or_nan(most, of_warps[0][w]);
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += kThreads) sum += scores[e] = expf(scores[e] - most);
    of_warps[1][warp] = sum_of_warp(sum);
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[1][w];
    const float share = ptx::approximate_reciprocal(sum);
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += kThreads) scores[e] *= share;
}

// A group is as good as its two best choices together; a warp takes a group at a time.
__device__ __forceinline__ void rate_groups(u32* group_keys, const u32* keys, int size, int groups) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int group = threadIdx.x / 32; group < groups; group += kWarps) {
        u32 first = 0, second = 0;  // a lane's own
#pragma unroll 1
        for (int i = lane; i < size; i += 32) {
            const u32 key = keys[group * size + i];
            second = max(second, min(first, key));
            first = max(first, key);
        }
        const u32 best = __reduce_max_sync(0xffffffff, first);
        const bool owner = lane == __ffs(static_cast<int>(__ballot_sync(0xffffffff, first == best))) - 1;
        const u32 next = __reduce_max_sync(0xffffffff, owner ? second : first);
        if (lane == 0) group_keys[group] = order(size > 1 ? number(best) + number(next) : number(best));
    }
}

// Whether fewer than `most` groups are better than this one: have a larger key, or the same and come before it.
__device__ __forceinline__ bool among_best(const u32* group_keys, int group, int groups, int most) {
    int better = 0;
#pragma unroll 4
    for (int other = 0; other < groups; ++other)
        better += group_keys[other] > group_keys[group] || (group_keys[other] == group_keys[group] && other < group);
    return better < most;
}

// A warp takes the experts with the largest keys, of equal ones the lowest first; lane s gets slot s.
__device__ __forceinline__ int choose(u32* keys, int count, int top_k) {
    const int lane = threadIdx.x;
    int chosen = 0, place = 0, next_place = 0;
    u32 largest = 0, next = 0;  // of the lane's own: lane, lane + 32, ...; 0: it has to look
    const auto look = [&] {
        largest = next = 0;
#pragma unroll 4
        for (int e = lane; e < count; e += 32) {
            const u32 key = keys[e];
            const bool first = key > largest, second = !first && key > next;
            next_place = first ? place : second ? e : next_place;
            next = first ? largest : second ? key : next;
            place = first ? e : place;
            largest = first ? key : largest;
        }
    };
    look();
#pragma unroll 1
    for (int slot = 0; slot < top_k; ++slot) {
        const u32 most = __reduce_max_sync(0xffffffff, largest);
        const int expert = __reduce_min_sync(0xffffffff, largest == most ? place : count - 1);
        if (lane == slot) chosen = expert;
        if (lane == expert % 32) {
            keys[expert] = 0;
            if (next > 0) {
                largest = next;
                place = next_place;
                next = 0;
            } else {
                look();
            }
        }
        __syncwarp();
    }
    return chosen;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    route_tokens(const float* logits,  // [parts * sums, num_tokens, num_experts], to be added up
                 int parts, int sums,
                 int rehearse,         // first; then the bias is older than the launch before
                 const float* bias,    // [num_experts], added to what chooses; null: nothing
                 int all_experts, int top_k,
                 int softmax, int renormalize, float scale, int groups, int top_groups,
                 int* __restrict__ topk_ids, float* __restrict__ topk_weights) {  // [num_tokens, top_k]
    extern __shared__ __align__(16) float of_experts[];  // sized by them: CTAs shall find room beside the launch before
    __shared__ float of_warps[2][kWarps];
    __shared__ u32 group_keys[32];
    const int thread = threadIdx.x, token = blockIdx.x, stride = (all_experts + 1) / 2 * 2;
    float *const scores = of_experts, *const biases = scores + stride;
    u32* const keys = reinterpret_cast<u32*>(biases + stride);  // of what chooses; 0: cannot be chosen
    logits += static_cast<i64>(token) * all_experts;
    if (!rehearse) ptx::wait_for_launches_before();
#pragma unroll 1
    for (int e = thread; e < all_experts; e += kThreads) biases[e] = bias != nullptr ? bias[e] : 0.0f;
#pragma unroll 1
    for (bool last = !rehearse;; last = true) {
        if (last) {
            ptx::wait_for_launches_before();
            ptx::let_next_launch_begin();
        }
        const int num_experts = last ? all_experts : min(all_experts, groups * 4), size = num_experts / groups;
        add_up(scores, logits, last ? parts : 0, sums, static_cast<i64>(gridDim.x) * all_experts, num_experts);
        __syncthreads();
        if (softmax) softmax_of(scores, of_warps, num_experts);
#pragma unroll 1
        for (int e = thread; e < num_experts; e += kThreads) {
            if (!softmax) scores[e] = ptx::approximate_reciprocal(1.0f + expf(-scores[e]));
            keys[e] = order(scores[e] + biases[e]);
        }
        __syncthreads();
        if (top_groups < groups) {
            rate_groups(group_keys, keys, size, groups);
            __syncthreads();
#pragma unroll 1
            for (int e = thread; e < num_experts; e += kThreads)
                if (!among_best(group_keys, e / size, groups, top_groups)) keys[e] = 0;
            __syncthreads();
        }

        if (thread < 32) {
            const int expert = choose(keys, num_experts, last ? top_k : 1);
            float weight = thread < top_k ? scores[expert] : 0.0f;
            const float total = sum_of_warp(weight);
            if (renormalize) weight *= ptx::approximate_reciprocal(softmax ? total : total + 1e-20f);
            if (last && thread < top_k) {
                topk_ids[static_cast<i64>(token) * top_k + thread] = expert;
                topk_weights[static_cast<i64>(token) * top_k + thread] = weight * scale;
            }
        }
        if (last) return;
        __syncthreads();
    }
}
