// Calls that the GPUs of callers make by themselves. Each has a slot: a header and rows in the memory of this GPU,
// which the caller's GPU writes, and an answer and rows in the memory of the caller's, which this one writes. The
// layout is that of kernels/device_calls.py.
#pragma once

#include "request_table.cuh"

constexpr int kMaxCalls = 256;  // slots, with a thread each; as many as requests in a table

// A call's header is one word, so that it is whole whenever it is seen, and is written after the rows: its sequence (1,
// 2, 3, ... of its slot, modulo 2^40), model and num_tokens, which have 12 bits each.
constexpr int kFieldBits = 12, kSequenceShift = 2 * kFieldBits;
constexpr u64 kSequences = 1ull << (64 - kSequenceShift);

struct alignas(16) CallSlot {
    u64 header;                                 // of a u64, read once for each call
    u64 hidden_states, topk_ids, topk_weights;  // bf16 [max_tokens, h], int32 and fp32 [max_tokens, top_k]
    u64 answer;                                 // u64: the sequence of the last call that is answered
    u64 out;                                    // [max_tokens, h] of out_datatype
    u64 layers;                                 // u32 [num_models]: the layer of each model that the caller may name
    u64 sequence;                               // of the last call that was taken
    u32 max_tokens /* at most those of the largest graph */, num_models, out_datatype, unused;
};

struct alignas(16) Answer {
    u64 place, sequence;
};

struct CallStep {
    u64 began;       // by %globaltimer, ns
    u32 first_slot;  // where the next step begins to look, so that all slots have their turn
    u32 layer, num_calls, num_tokens;
    Answer answers[kMaxCalls];  // num_calls
};

enum Until : u32 { kForever, kStopped, kNoCalls };  // for how long steps follow each other
constexpr u64 kRefused = 1ull << 63;                // in an answer: there is no output, because the header was invalid
constexpr int kCounts = 4;                          // of a layer: steps, calls, tokens, ns
