// The first kernel of an armed step: waits until there are calls, takes those of one layer that are there, and chooses
// what the step's graph runs. One CTA with a thread for each slot.
#include "device_calls.cuh"

extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);

constexpr u32 kNone = 0xffffffff;
constexpr u32 kLooksPerWord = 16;  // to read a word of the host takes as long as several looks

extern "C" __global__ void __launch_bounds__(kMaxCalls)
    take_calls(CallSlot* slots,        // [kMaxCalls]
               const u32* until_word,  // in host memory: when the loop ends
               RequestTable* table, CallStep* step,
               const u32* sizes,  // [num_sizes], at most 32, ascending: tokens of the graphs of each layer
               u32 num_sizes, u32 num_layers,
               u32* faults,           // in host memory, [kMaxCalls]: 1: the slot's caller has sent an invalid header
               u64* taken,            // in host memory, [kMaxCalls]: the sequence of each slot's last call
               u64 chosen, u64 again  // conditions: layer * num_sizes + size; whether another step follows
    ) {
    __shared__ u32 best, total, chosen_layer;
    __shared__ u32 sums[kMaxCalls], warp_sums[kMaxCalls / 32];
    const u32 thread = threadIdx.x, lane = thread % 32, most = sizes[num_sizes - 1];
    CallSlot slot = slots[thread];
    const u32 first = step->first_slot, turn = (thread - first) % kMaxCalls;
    const u64* const header = reinterpret_cast<const u64*>(slot.header);

    u32 num_tokens, layer;
    bool is_call;
    for (;;) {
        u64 seen;
        u32 until = kForever;
        bool ends = false;
        for (u32 look = 0;; ++look) {
            seen = ptx::load_acquire_system(header);
            const bool asks = look % kLooksPerWord == 0;
            if (asks && thread == 0) until = ptx::load_relaxed_system(until_word);
            const bool any = __syncthreads_or(seen >> kSequenceShift != slot.sequence);
            if (!any && !asks) continue;
            ends = __syncthreads_or(thread == 0 && (until == kStopped || (until == kNoCalls && !any)));
            if (any || ends) break;
        }
        if (ends) {
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
            layer = kNone;
            if (follows && model < slot.num_models && num_tokens <= slot.max_tokens)
                layer = reinterpret_cast<const u32*>(slot.layers)[model];
            if (layer >= num_layers) {
                is_call = false;
                faults[thread] = 1;
                slots[thread].sequence = slot.sequence = sequence;
                ptx::store_release_system(reinterpret_cast<u64*>(slot.answer), sequence | kRefused);
            }
        }
        if (thread == 0) best = kNone;
        __syncthreads();
        if (is_call) atomicMin(&best, turn);
        __syncthreads();
        if (best != kNone) break;
    }

    // Of that layer, as many in turn as the largest graph has room for: count and tokens, summed up to each.
    if (is_call && turn == best) chosen_layer = layer;
    if (thread == 0) total = 0;
    sums[thread] = 0;
    __syncthreads();
    const bool fits_layer = is_call && layer == chosen_layer;
    if (fits_layer) sums[turn] = 1 << 20 | num_tokens;
    __syncthreads();
    u32 sum = static_cast<u32>(ptx::warp_prefix_sum(static_cast<int>(sums[thread])));
    if (lane == 31) warp_sums[thread / 32] = sum;
    __syncthreads();
    for (u32 warp = 0; warp < thread / 32; ++warp) sum += warp_sums[warp];
    sums[thread] = sum;
    __syncthreads();
    sum = sums[turn];
    const u32 end_token = sum & 0xfffff, place = (sum >> 20) - 1;
    const bool is_taken = fits_layer && end_token <= most;
    if (is_taken) {
        atomicMax(&total, sum);
        const Request request = {slot.hidden_states,     slot.topk_ids, slot.topk_weights, slot.out,
                                 end_token - num_tokens, end_token,     slot.out_datatype, 0};
        table->requests[place] = request;
        const u64 sequence = (slot.sequence + 1) % kSequences;
        step->answers[place] = {slot.answer, sequence};
        slots[thread].sequence = sequence;
        taken[thread] = sequence;
    }
    __syncthreads();
    if (thread >= 32) return;
    const u32 tokens = total & 0xfffff, calls = total >> 20;
    const u32 size = __ffs(__ballot_sync(0xffffffff, lane < num_sizes && sizes[lane] >= tokens)) - 1;
    if (thread > 0) return;
    table->num_tokens = tokens;
    table->num_requests = calls;
    step->began = ptx::global_nanoseconds();
    step->first_slot = (first + best + 1) % kMaxCalls;
    step->layer = chosen_layer;
    step->num_calls = calls;
    step->num_tokens = tokens;
    cudaGraphSetConditional(chosen, chosen_layer * num_sizes + size);
}
