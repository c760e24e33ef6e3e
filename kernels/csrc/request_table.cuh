// Where the rows of a step's requests lie, in host memory that the host writes before every launch. The layout is that
// of kernels/request_table.py.
#pragma once

#include "ptx.cuh"

constexpr u32 kMostRequests = 256;

struct alignas(16) Request {
    u64 hidden_states;  // bf16 [tokens, h]
    u64 topk_ids;       // [tokens, top_k], int64 if has_int64_ids, else int32; null if the layer routes
    u64 topk_weights;   // fp32 [tokens, top_k]
    u64 out;            // [tokens, h] of out_datatype
    u32 first_token, end_token;
    u32 out_datatype, has_int64_ids;
};

struct alignas(16) RequestTable {
    u32 num_tokens, num_requests, unused[2];
    Request requests[1];  // num_requests, at most kMostRequests

    // Finds the request of `token`, with all threads of the CTA; false: none, the token is padding. A read of host
    // memory takes more than a microsecond, so the first request is read together with the header, the others all at
    // once. Volatile reads are not coalesced there, and take milliseconds.
    __device__ __forceinline__ bool find(Request& found, int token) const {
        Request mine;
        const u32 wanted = static_cast<u32>(token), thread = threadIdx.x;
        if (thread == 0) mine = requests[0];
        const uint4 header = *reinterpret_cast<const uint4*>(this);
        if (thread > 0 && thread < header.y) mine = requests[thread];
        if (thread < header.y && mine.first_token <= wanted && wanted < mine.end_token) found = mine;
        __syncthreads();
        return wanted < header.x;
    }

    // The same, with kThreads threads, for a table in the memory of this GPU, which an earlier launch has written: past
    // L1, where an SM may have that of an earlier step. The first warp reads its requests together with the header.
    template <u32 kThreads>
    __device__ __forceinline__ bool find_here(Request& found, int token) const {
        const u32 wanted = static_cast<u32>(token);
        const uint4 header = ptx::load_relaxed_system(reinterpret_cast<const uint4*>(this));
#pragma unroll
        for (u32 i = threadIdx.x; i < kMostRequests; i += kThreads) {
            if (i >= 32 && i >= header.y) continue;
            const uint4* const from = reinterpret_cast<const uint4*>(requests + i);
            const uint4 rows = ptx::load_relaxed_system(from), others = ptx::load_relaxed_system(from + 1);
            const uint4 tokens = ptx::load_relaxed_system(from + 2);  // first_token, end_token, ...
            if (i >= header.y || wanted < tokens.x || wanted >= tokens.y) continue;
            uint4* const to = reinterpret_cast<uint4*>(&found);
            to[0] = rows, to[1] = others, to[2] = tokens;
        }
        __syncthreads();
        return wanted < header.x;
    }
};
static_assert(sizeof(Request) == 48);
