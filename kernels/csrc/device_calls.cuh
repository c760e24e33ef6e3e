// Calls that the GPUs of callers make by themselves. Each has a slot: a header and rows in the memory of this GPU,
// which the caller's GPU writes, and an answer and rows in the memory of the caller's, which this one writes. The
// layout is that of kernels/device_calls.py.
#pragma once

#include "request_table.cuh"

constexpr int kMaxCalls = kMostRequests;  // slots, with a thread each

// A call's header is one word, so that it is whole whenever it is seen, and is written after the rows: its sequence (1,
// 2, 3, ... of its slot, modulo 2^40), model and num_tokens, which have 12 bits each.
constexpr int kFieldBits = 12, kSequenceShift = 2 * kFieldBits;
constexpr u64 kSequences = 1ull << (64 - kSequenceShift);

struct alignas(16) CallSlot {
    u64 header;                                 // of a u64, read once for each call
    u64 hidden_states, topk_ids, topk_weights;  // bf16 [max_tokens, h], int32 and fp32 [max_tokens, top_k]
    u64 answer;                                 // u64: the sequence of the last call that is answered
    u64 out;                                    // [max_tokens, h] of out_datatype
    u64 layers;                                 // CallLayer [num_models]: of each model that the caller may name
    u64 sequence;                               // of the last call that was taken
    u32 max_tokens /* at most those of the largest graph */, num_models, out_datatype, unused;
};

struct alignas(8) CallLayer {
    u32 number;  // too large a one: there is no such layer
    u16 top_k, num_experts;
};

struct alignas(16) CallAnswer {
    u64 place;
    u64 word;  // the number of the slot, times kSequences, and the sequence
};

struct CallStep {
    u64 until_word;  // of a u32 in host memory: when the loop ends, one of Until
    u64 counts;      // of u64 [num_layers, kCounts]
    u64 on_host;     // of the same in host memory, for the host to read
    u64 taken;       // of u64 [kMaxCalls] in host memory: the sequence of each slot's last call
    u64 began;       // by %globaltimer, ns
    u32 first_slot;  // where the next step begins to look, so that all slots have their turn
    u32 layer, num_calls, num_tokens;
    u32 until;                      // the word, as the last launch has seen it
    u32 arrived;                    // CTAs of the last launch
    CallAnswer answers[kMaxCalls];  // num_calls
};

enum Until : u32 { kForever, kStopped, kNoCalls };  // for how long steps follow each other
constexpr u64 kRefused = 1ull << 63;                // in an answer: there is no output, because the header was invalid
constexpr int kCounts = 4;                          // of a layer: steps, calls, tokens, ns

// What the last launch of a step does besides outputs, with kMaxCalls threads in each CTA: tells callers that these are
// there, and counts.
class CallAnswers {
  public:
    // Before the launch waits for the preceding ones, of which the first has written the step. An SM may still have
    // what an earlier step had there in its L1, so nothing is read through that.
    __device__ __forceinline__ explicit CallAnswers(CallStep* step) : step(step) {
        num_calls = ptx::load_relaxed_system(&step->num_calls);
        mine = ptx::load_relaxed_system(reinterpret_cast<const uint4*>(step->answers + threadIdx.x));
        taken = ptx::load_relaxed_system(&step->taken);
        if (reads_word())  // now, as it takes a while
            until = ptx::load_relaxed_system(reinterpret_cast<const u32*>(ptx::load_relaxed_system(&step->until_word)));
        if (threadIdx.x >= kCounts) return;
        const u64 offset = (ptx::load_relaxed_system(&step->layer) * kCounts + threadIdx.x) * sizeof(u64);
        counted = ptx::load_relaxed_system(&step->counts) + offset;
        on_host = ptx::load_relaxed_system(&step->on_host) + offset;
        const u32 num_tokens = ptx::load_relaxed_system(&step->num_tokens);
        const u64 began = ptx::load_relaxed_system(&step->began);
        count = ptx::load_relaxed_system(reinterpret_cast<const u64*>(counted));
        count += threadIdx.x == 0 ? 1 : threadIdx.x == 1 ? num_calls : threadIdx.x == 2 ? num_tokens : -began;
    }

    // After the CTA's threads have written their outputs: the last CTA answers.
    __device__ __forceinline__ void write() const {
        __shared__ bool is_last;
        if (reads_word()) step->until = until;
        __syncthreads();
        if (threadIdx.x == 0) {
            const u32 last = gridDim.x - 1;
            is_last = last == 0 || ptx::increment_acquire_release(&step->arrived, last) == last;
        }
        __syncthreads();
        if (!is_last) return;
        if (threadIdx.x < num_calls) {
            const u64 word = static_cast<u64>(mine.w) << 32 | mine.z, sequence = word % kSequences;
            ptx::store_release_system(reinterpret_cast<u64*>(static_cast<u64>(mine.y) << 32 | mine.x), sequence);
            reinterpret_cast<u64*>(taken)[word / kSequences] = sequence;
        }
        if (threadIdx.x >= kCounts || num_calls == 0) return;
        const u64 sum = count + (threadIdx.x == 3 ? ptx::global_nanoseconds() : 0);
        *reinterpret_cast<u64*>(counted) = sum;
        *reinterpret_cast<u64*>(on_host) = sum;
    }

  private:
    static __device__ __forceinline__ bool reads_word() { return blockIdx.x == 0 && threadIdx.x == 0; }

    CallStep* const step;
    u32 num_calls, until = kForever;
    uint4 mine;  // this thread's CallAnswer
    u64 taken;
    u64 counted = 0, on_host = 0, count = 0;  // this thread's count: where it is, and what it comes to
};
