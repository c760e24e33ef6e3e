// The first kernel of an armed step: waits until there are calls, takes those of one layer that are there, copies their
// routing, and chooses what the step's graph runs. One CTA with a thread for each slot.
#include "device_calls.cuh"

extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);

constexpr u32 kNone = 0xffffffff;
constexpr u32 kLooksPerWord = 16;  // to read a word of the host takes as long as several looks
constexpr int kAtOnce = 4;         // pairs of a thread whose routing is on its way

extern "C" __global__ void __launch_bounds__(kMaxCalls)
    take_calls(CallSlot* slots,  // [kMaxCalls]
               RequestTable* table, CallStep* step, int* topk_ids,
               float* topk_weights,  // the step's routing, [tokens of its graph, top_k]; -1: no expert
               const u32* sizes,     // [num_sizes], at most 32, ascending: tokens of the graphs of each layer
               u32 num_sizes, u32 num_layers,
               u32* faults,           // in host memory, [kMaxCalls]: 1: the slot's caller has sent an invalid header
               u64 chosen, u64 again  // conditions: layer * num_sizes + size; whether another step follows
    ) {
    __shared__ u32 best, total;
    __shared__ CallLayer chosen_layer;
    __shared__ u32 sums[kMaxCalls], warp_sums[kMaxCalls / 32];
    __shared__ u32 ends[kMaxCalls];  // of the calls that are taken: the token after their last one, and their routing
    __shared__ const int* ids[kMaxCalls];
    __shared__ const float* weights[kMaxCalls];
    const u32 thread = threadIdx.x, lane = thread % 32;
    CallSlot slot = slots[thread];
    const u32 own_size = lane < num_sizes ? sizes[lane] : 0;
    const u32 max_tokens = __shfl_sync(0xffffffff, own_size, num_sizes - 1);
    const u32 first = step->first_slot, order = (thread - first) % kMaxCalls;
    const u64* const header = reinterpret_cast<const u64*>(slot.header);
    const u32* const until_word = reinterpret_cast<const u32*>(step->until_word);
    u32 until = step->until;  // as of the last step, if there was one since the loop began
    const u32 asks_at = step->num_calls == 0 ? 0 : kLooksPerWord - 1;

    u32 num_tokens = 0;
    CallLayer layer = {kNone, 0, 0};
    bool is_call;
    for (;;) {
        u64 seen;
        bool ends_now = false;
        for (u32 look = 0;; ++look) {
            seen = ptx::load_acquire_system(header);
            const bool asks = look % kLooksPerWord == asks_at;
            if (asks && thread == 0) until = ptx::load_relaxed_system(until_word);
            const bool any = __syncthreads_or(seen >> kSequenceShift != slot.sequence);
            if (!any && !asks && look > 0) continue;
            ends_now = __syncthreads_or(thread == 0 && (until == kStopped || (until == kNoCalls && !any)));
            if (any || ends_now) break;
        }
        if (ends_now) {
            if (thread == 0) {
                step->num_calls = 0;
                cudaGraphSetConditional(chosen, num_layers * num_sizes);  // nothing
                cudaGraphSetConditional(again, 0);
            }
            return;
        }
        const u64 sequence = seen >> kSequenceShift;
        is_call = sequence != slot.sequence;
        if (is_call) {
            const bool follows = sequence == (slot.sequence + 1) % kSequences;
            const u32 fields = static_cast<u32>(seen), model = fields >> kFieldBits & ((1 << kFieldBits) - 1);
            num_tokens = fields & ((1 << kFieldBits) - 1);
            layer.number = kNone;
            if (follows && model < slot.num_models && num_tokens <= slot.max_tokens)
                layer = reinterpret_cast<const CallLayer*>(slot.layers)[model];
            if (layer.number >= num_layers) {
                is_call = false;
                faults[thread] = 1;
                slots[thread].sequence = slot.sequence = sequence;
                ptx::store_release_system(reinterpret_cast<u64*>(slot.answer), sequence | kRefused);
            }
        }
        if (thread == 0) best = kNone;
        __syncthreads();
        if (is_call) atomicMin(&best, order);
        __syncthreads();
        if (best != kNone) break;
    }

    // Of that layer, as many in turn as the largest graph has room for: count and tokens, summed up to each.
    if (is_call && order == best) chosen_layer = layer;
    if (thread == 0) total = 0;
    sums[thread] = 0;
    __syncthreads();
    const bool fits_layer = is_call && layer.number == chosen_layer.number;
    if (fits_layer) sums[order] = 1 << 20 | num_tokens;
    __syncthreads();
    u32 sum = static_cast<u32>(ptx::warp_prefix_sum(static_cast<int>(sums[thread])));
    if (lane == 31) warp_sums[thread / 32] = sum;
    __syncthreads();
    for (u32 warp = 0; warp < thread / 32; ++warp) sum += warp_sums[warp];
    sums[thread] = sum;
    __syncthreads();
    sum = sums[order];
    const u32 end_token = sum & 0xfffff, place = (sum >> 20) - 1;
    const bool is_taken = fits_layer && end_token <= max_tokens;
    if (is_taken) {
        atomicMax(&total, sum);
        ends[place] = end_token;
        ids[place] = reinterpret_cast<const int*>(slot.topk_ids);
        weights[place] = reinterpret_cast<const float*>(slot.topk_weights);
        const Request request = {slot.hidden_states,     slot.topk_ids, slot.topk_weights, slot.out,
                                 end_token - num_tokens, end_token,     slot.out_datatype, 0};
        table->requests[place] = request;
        const u64 sequence = (slot.sequence + 1) % kSequences;
        step->answers[place] = {slot.answer, thread * kSequences + sequence};
        slots[thread].sequence = sequence;
    }
    __syncthreads();
    const u32 tokens = total & 0xfffff, calls = total >> 20;
    const u32 size = __ffs(__ballot_sync(0xffffffff, lane < num_sizes && own_size >= tokens)) - 1;
    if (thread == kMaxCalls - 1) {  // of a warp that mostly has no routing to copy
        cudaGraphSetConditional(chosen, chosen_layer.number * num_sizes + size);
        table->num_tokens = tokens;
        table->num_requests = calls;
        step->began = ptx::global_nanoseconds();
        step->first_slot = (first + best + 1) % kMaxCalls;
        step->layer = chosen_layer.number;
        step->num_calls = calls;
        step->num_tokens = tokens;
    }

    // Their routing, each number read once: what a caller changes later has no effect.
    const u32 top_k = chosen_layer.top_k, num_experts = chosen_layer.num_experts;
    const u32 pairs = tokens * top_k, padded = __shfl_sync(0xffffffff, own_size, size) * top_k;
#pragma unroll 1
    for (u32 begin = thread; begin < padded; begin += kMaxCalls * kAtOnce) {
        int id[kAtOnce];
        float weight[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const u32 pair = begin + i * kMaxCalls, token = pair / top_k;
            id[i] = -1, weight[i] = 0.0f;
            if (pair >= pairs) continue;
            u32 of = 0;  // the first call that ends behind the token
#pragma unroll 1
            for (u32 end = calls - 1; of < end;) {
                const u32 middle = (of + end) / 2;
                if (ends[middle] > token)
                    end = middle;
                else
                    of = middle + 1;
            }
            const u32 given = pair - (of == 0 ? 0 : ends[of - 1]) * top_k;
            id[i] = ids[of][given];
            weight[i] = weights[of][given];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const u32 pair = begin + i * kMaxCalls;
            if (pair >= padded) continue;
            topk_ids[pair] = static_cast<u32>(id[i]) < num_experts ? id[i] : -1;
            topk_weights[pair] = weight[i];
        }
    }
}
