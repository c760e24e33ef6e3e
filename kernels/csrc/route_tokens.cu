// A token's experts and their weights out of its logits: the rules of kernels/router.py, a warp for each token.
#include "ptx.cuh"

constexpr int kWarps = 4;
constexpr int kPerLane = PER_LANE;  // experts a lane looks at: lane, lane + 32, ...

__device__ __forceinline__ float lowest() { return __int_as_float(0xff800000); }  // minus infinity

// The largest of some numbers and where it was; of equal ones the lowest place. NaN is larger than any, as in a sort.
struct Best {
    float value;
    int place;
    __device__ __forceinline__ void see(float other, int at) {
        const bool nan = value != value, other_nan = other != other;
        const bool larger = other_nan ? !nan : other > value, same = other_nan ? nan : other == value;
        if (larger || (same && at < place)) {
            value = other;
            place = at;
        }
    }
    __device__ __forceinline__ void of_warp() {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            see(__shfl_xor_sync(0xffffffff, value, distance), __shfl_xor_sync(0xffffffff, place, distance));
    }
};
__device__ __forceinline__ Best none() { return {lowest(), 1 << 30}; }

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    route_tokens(const float* logits,               // [num_tokens, num_experts]
                 const float* __restrict__ bias,    // [num_experts], added to what chooses; null: nothing
                 int num_tokens, int num_experts, int top_k,
                 int softmax, int renormalize, float scale, int groups, int top_groups,
                 int* __restrict__ topk_ids, float* __restrict__ topk_weights) {  // [num_tokens, top_k]
    __shared__ float choices[kWarps][kPerLane * 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * kWarps + warp;
    ptx::wait_for_launches_before();
    ptx::let_next_launch_begin();
    if (token >= num_tokens) return;
    logits += static_cast<i64>(token) * num_experts;

    float scores[kPerLane];
    float most = lowest();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int expert = i * 32 + lane;
        scores[i] = expert < num_experts ? logits[expert] : lowest();
        most = ptx::max_or_nan(most, scores[i]);
    }
    if (softmax) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            most = ptx::max_or_nan(most, __shfl_xor_sync(0xffffffff, most, distance));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) sum += scores[i] = expf(scores[i] - most);
        sum = sum_of_warp(sum);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) scores[i] = __fdiv_rn(scores[i], sum);
    } else {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) scores[i] = __fdiv_rn(1.0f, 1.0f + expf(-scores[i]));
    }

    u32 left = 0;  // bit i: this lane's expert i can be chosen
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int expert = i * 32 + lane;
        if (expert >= num_experts) continue;
        left |= 1u << i;
        choices[warp][expert] = scores[i] + (bias ? bias[expert] : 0.0f);
    }
    __syncwarp();
    if (top_groups < groups) {
        const int size = num_experts / groups;
        u32 chosen = 0;  // groups, 32 at most
        Best best = {lowest(), lane};
        if (lane < groups) {
            float first = lowest(), second = first;
            for (int i = 0; i < size; ++i) {
                const float value = choices[warp][lane * size + (i + lane) % size];  // each lane in another bank
                second = ptx::max_or_nan(second, ptx::min_or_nan(first, value));
                first = ptx::max_or_nan(first, value);
            }
            best.value = size > 1 ? first + second : first;
        }
        for (int i = 0; i < top_groups; ++i) {
            Best now = lane < groups && !(chosen >> lane & 1) ? best : none();
            now.of_warp();
            chosen |= 1u << now.place;
        }
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (!(chosen >> (i * 32 + lane) / size & 1)) left &= ~(1u << i);
    }

    int own_id = 0;
    float own_weight = 0.0f, total = 0.0f;  // lane s keeps slot s
    for (int slot = 0; slot < top_k; ++slot) {
        Best best = none();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
            if (left >> i & 1) best.see(choices[warp][i * 32 + lane], i * 32 + lane);
        best.of_warp();
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            if (best.place != i * 32 + lane) continue;
            score = scores[i];
            left &= ~(1u << i);
        }
        score = __shfl_sync(0xffffffff, score, best.place % 32);
        total += score;
        if (lane == slot) {
            own_id = best.place;
            own_weight = score;
        }
    }
    if (lane < top_k) {
        if (renormalize) own_weight = __fdiv_rn(own_weight, softmax ? total : total + 1e-20f);
        topk_ids[static_cast<i64>(token) * top_k + lane] = own_id;
        topk_weights[static_cast<i64>(token) * top_k + lane] = own_weight * scale;
    }
}
