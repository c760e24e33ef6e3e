// A token's experts and their weights from its logits, by the rules of kernels/ops/router.py: one CTA per token.
//
// In a decode step the layer's weights have pushed this code out of the L2 cache, and fetching it takes longer than
// running it: a dry run without logits fetches it while the preceding launch computes them. Loops are kept rolled for
// the same reason.
#include "ptx.cuh"

constexpr bool kBiasesLogits = LOGIT_BIAS;  // router_bias is added to the logits, not to the scores to choose by
constexpr int kWarps = 4, kThreads = kWarps * 32;

// A key that sorts as x does: both zeros have the same key and NaN has the largest, as in torch.sort. Never 0.
__device__ __forceinline__ u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? 0xffffffff : bits >> 31 ? ~bits : bits | 0x80000000;
}
// The inverse: the number with this key.
__device__ __forceinline__ float from_key(u32 key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000 : ~key); }

__device__ __forceinline__ float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = ptx::max_or_nan(value, __shfl_xor_sync(0xffffffff, value, distance));
    return value;
}

// Loads a token's logits, four sums or one per part, and adds them up in router_logits.cu's order for many tokens.
__device__ __forceinline__ void add_up(float* scores, const float* logits, int parts, int sums, i64 stride, int count) {
    constexpr int kParts = 8, kSums = SUMS;  // loaded together by a thread
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

// Replaces logits by their softmax.
__device__ __forceinline__ void softmax(float* scores, float (&per_warp)[2][kWarps], int count) {
    const int warp = threadIdx.x / 32;
    float largest = __int_as_float(0xff800000), sum = 0.0f;  // minus infinity
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += kThreads) largest = ptx::max_or_nan(largest, scores[e]);
    per_warp[0][warp] = warp_max(largest);
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) largest = ptx::max_or_nan(largest, per_warp[0][w]);
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += kThreads) sum += scores[e] = expf(scores[e] - largest);
    per_warp[1][warp] = warp_sum(sum);
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += per_warp[1][w];
    const float share = ptx::approximate_reciprocal(sum);
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += kThreads) scores[e] *= share;
}

// A group's score is the sum of its two best experts' scores; each warp handles one group at a time.
__device__ __forceinline__ void score_groups(u32* group_keys, const u32* keys, int size, int num_expert_groups) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int group = threadIdx.x / 32; group < num_expert_groups; group += kWarps) {
        u32 first = 0, second = 0;  // of this lane
#pragma unroll 1
        for (int i = lane; i < size; i += 32) {
            const u32 key = keys[group * size + i];
            second = max(second, min(first, key));
            first = max(first, key);
        }
        const u32 best = __reduce_max_sync(0xffffffff, first);
        const bool owner = lane == __ffs(static_cast<int>(__ballot_sync(0xffffffff, first == best))) - 1;
        const u32 next = __reduce_max_sync(0xffffffff, owner ? second : first);
        if (lane == 0) group_keys[group] = key_of(size > 1 ? from_key(best) + from_key(next) : from_key(best));
    }
}

// Whether fewer than topk_group groups beat this one, with a larger key or with the same key and a lower index.
__device__ __forceinline__ bool is_chosen(const u32* group_keys, int group, int num_expert_groups, int topk_group) {
    int better = 0;
#pragma unroll 4
    for (int other = 0; other < num_expert_groups; ++other)
        better += group_keys[other] > group_keys[group] || (group_keys[other] == group_keys[group] && other < group);
    return better < topk_group;
}

// One warp takes the experts with the largest keys, ties going to the lower index; lane s returns slot s.
__device__ __forceinline__ int choose(u32* keys, int count, int top_k) {
    const int lane = threadIdx.x;
    int chosen = 0, place = 0, next_place = 0;
    u32 largest = 0, next = 0;  // among this lane's experts: lane, lane + 32, ...; 0: search again
    const auto search = [&] {
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
    search();
#pragma unroll 1
    for (int slot = 0; slot < top_k; ++slot) {
        const u32 maximum = __reduce_max_sync(0xffffffff, largest);
        const int expert = __reduce_min_sync(0xffffffff, largest == maximum ? place : count - 1);
        if (lane == slot) chosen = expert;
        if (lane == expert % 32) {
            keys[expert] = 0;
            if (next > 0) {
                largest = next;
                place = next_place;
                next = 0;
            } else {
                search();
            }
        }
        __syncwarp();
    }
    return chosen;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    route_tokens(const float* logits,  // [parts * sums, num_tokens, num_experts], to be added up
                 int parts, int sums,
                 int dry_run,               // do one first; the preceding launch must then not write router_bias
                 const float* router_bias,  // [num_experts], added to the scores to choose by, or logits; null: none
                 int all_experts, int top_k,
                 int use_softmax,  // else sigmoid
                 int renormalize, float routed_scaling_factor, int num_expert_groups, int topk_group,
                 const u32* end_token,  // tokens from here on are padding, without experts; null: none is
                 int* __restrict__ topk_ids, float* __restrict__ topk_weights  // [num_tokens, top_k]
    ) {
    extern __shared__ __align__(16) float per_expert[];  // no larger than needed, to fit beside the preceding launch
    __shared__ float per_warp[2][kWarps];
    __shared__ u32 group_keys[32];
    const int thread = threadIdx.x, token = blockIdx.x, stride = (all_experts + 1) / 2 * 2;
    float *const scores = per_expert, *const biases = scores + stride;
    u32* const keys = reinterpret_cast<u32*>(biases + stride);  // of the scores to choose by; 0: cannot be chosen
    logits += static_cast<i64>(token) * all_experts;
    const bool is_padding = end_token != nullptr && static_cast<u32>(token) >= *end_token;
    if (!dry_run) ptx::grid_dependency_wait();
#pragma unroll 1
    for (int e = thread; e < all_experts; e += kThreads) biases[e] = router_bias != nullptr ? router_bias[e] : 0.0f;
#pragma unroll 1
    for (bool last = !dry_run;; last = true) {
        if (last) {
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
        }
        const int num_experts = last ? all_experts : min(all_experts, num_expert_groups * 4);
        const int size = num_experts / num_expert_groups;  // of an expert group
        add_up(scores, logits, last ? parts : 0, sums, static_cast<i64>(gridDim.x) * all_experts, num_experts);
        __syncthreads();
        if constexpr (kBiasesLogits) {
#pragma unroll 1
            for (int e = thread; e < num_experts; e += kThreads) scores[e] += biases[e];
            __syncthreads();
        }
        if (use_softmax) softmax(scores, per_warp, num_experts);
#pragma unroll 1
        for (int e = thread; e < num_experts; e += kThreads) {
            if (!use_softmax) scores[e] = ptx::approximate_reciprocal(1.0f + expf(-scores[e]));
            keys[e] = key_of(kBiasesLogits ? scores[e] : scores[e] + biases[e]);
        }
        __syncthreads();
        if (topk_group < num_expert_groups) {
            score_groups(group_keys, keys, size, num_expert_groups);
            __syncthreads();
#pragma unroll 1
            for (int e = thread; e < num_experts; e += kThreads)
                if (!is_chosen(group_keys, e / size, num_expert_groups, topk_group)) keys[e] = 0;
            __syncthreads();
        }

        if (thread < 32) {
            const int expert = choose(keys, num_experts, last ? top_k : 1);
            float weight = thread < top_k ? scores[expert] : 0.0f;
            const float total = warp_sum(weight);
            if (renormalize) weight *= ptx::approximate_reciprocal(use_softmax ? total : total + 1e-20f);
            if (last && thread < top_k) {
                topk_ids[static_cast<i64>(token) * top_k + thread] = is_padding ? -1 : expert;
                topk_weights[static_cast<i64>(token) * top_k + thread] = weight * routed_scaling_factor;
            }
        }
        if (last) return;
        __syncthreads();
    }
}
