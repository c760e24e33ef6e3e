// A token's experts and their weights out of its logits: the rules of kernels/router.py, a CTA of one warp for each.
//
// Loops are hardly unrolled: in a decode step the weights have pushed this code out of the L2 cache, and fetching it takes
// as long as running it.
#include "ptx.cuh"

constexpr int kMostExperts = 1024;

// Larger numbers have larger ones; zeros are alike, and NaN is larger than any, as in a sort. Never 0.
__device__ __forceinline__ u32 order(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? 0xffffffff : bits >> 31 ? ~bits : bits | 0x80000000;
}

// The place of the largest of the lanes' keys, of equal ones the lowest.
__device__ __forceinline__ int place_of_largest(u32 key, int place) {
    const u32 most = __reduce_max_sync(0xffffffff, key);
    return __reduce_min_sync(0xffffffff, key == most ? place : 1 << 30);
}

__device__ __forceinline__ float sum_of_warp(float value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}

// A token's logits and the bias (zeros where there is none) to shared memory; a lane has lane, lane + 32, ...
__device__ __forceinline__ void load(float* scores, const float* logits, float* choices, const float* bias, int count) {
    constexpr int kAtOnce = 8;  // of each, loads a lane has under way
#pragma unroll 1
    for (int base = threadIdx.x; base < count; base += 32 * kAtOnce) {
        float logit[kAtOnce], added[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const bool there = base + i * 32 < count;
            logit[i] = there ? logits[base + i * 32] : 0.0f;
            added[i] = there && bias != nullptr ? bias[base + i * 32] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (base + i * 32 >= count) break;
            scores[base + i * 32] = logit[i];
            choices[base + i * 32] = added[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(32)
    route_tokens(const float* logits,               // [num_tokens, num_experts]
                 const float* bias,                 // [num_experts], added to what chooses; null: nothing
                 int num_experts, int top_k,
                 int softmax, int renormalize, float scale, int groups, int top_groups,
                 int* __restrict__ topk_ids, float* __restrict__ topk_weights) {  // [num_tokens, top_k]
    __shared__ float scores[kMostExperts], choices[kMostExperts];
    const int lane = threadIdx.x, token = blockIdx.x;
    ptx::wait_for_launches_before();
    ptx::let_next_launch_begin();
    load(scores, logits + static_cast<i64>(token) * num_experts, choices, bias, num_experts);

    float most = __int_as_float(0xff800000), sum = 0.0f;  // minus infinity
    if (softmax) {
#pragma unroll 2
        for (int e = lane; e < num_experts; e += 32) most = ptx::max_or_nan(most, scores[e]);
        for (int distance = 16; distance > 0; distance /= 2)
            most = ptx::max_or_nan(most, __shfl_xor_sync(0xffffffff, most, distance));
    }
#pragma unroll 2
    for (int e = lane; e < num_experts; e += 32) {
        const float exponential = expf(softmax ? scores[e] - most : -scores[e]);
        sum += exponential;
        scores[e] = softmax ? exponential : ptx::approximate_reciprocal(1.0f + exponential);
    }
    const float share = softmax ? ptx::approximate_reciprocal(sum_of_warp(sum)) : 1.0f;
#pragma unroll 2
    for (int e = lane; e < num_experts; e += 32) choices[e] += scores[e] *= share;
    __syncwarp();

    u32 open = 0xffffffff;  // bit g: group g's experts can be chosen; groups are 32 at most
    const int size = num_experts / groups;
    if (top_groups < groups) {
        u32 key = 0;  // a lane has a group
        if (lane < groups) {
            float first = __int_as_float(0xff800000), second = first;
            int at = lane % size;  // each lane in another bank
#pragma unroll 2
            for (int i = 0; i < size; ++i) {
                const float value = choices[lane * size + at];
                at = at + 1 < size ? at + 1 : 0;
                second = ptx::max_or_nan(second, ptx::min_or_nan(first, value));
                first = ptx::max_or_nan(first, value);
            }
            key = order(size > 1 ? first + second : first);
        }
        open = 0;
#pragma unroll 1
        for (int i = 0; i < top_groups; ++i) {
            const int group = place_of_largest(key, lane);
            open |= 1u << group;
            if (lane == group) key = 0;
        }
    }
    u32* const keys = reinterpret_cast<u32*>(choices);
#pragma unroll 1
    for (int e = lane; e < num_experts; e += 32) keys[e] = open >> e / size & 1 ? order(choices[e]) : 0;

    int own_id = 0;
    float own_weight = 0.0f, total = 0.0f;  // lane s keeps slot s
#pragma unroll 1
    for (int slot = 0; slot < top_k; ++slot) {
        u32 key = 0;
        int place = 0;
#pragma unroll 4
        for (int e = lane; e < num_experts; e += 32) {
            const u32 other = keys[e];
            place = other > key ? e : place;
            key = max(key, other);
        }
        const int expert = place_of_largest(key, place);
        if (expert % 32 == lane) keys[expert] = 0;
        const float score = scores[expert];
        total += score;
        if (lane == slot) {
            own_id = expert;
            own_weight = score;
        }
    }
    if (lane < top_k) {
        if (renormalize) own_weight *= ptx::approximate_reciprocal(softmax ? total : total + 1e-20f);
        topk_ids[static_cast<i64>(token) * top_k + lane] = own_id;
        topk_weights[static_cast<i64>(token) * top_k + lane] = own_weight * scale;
    }
}
