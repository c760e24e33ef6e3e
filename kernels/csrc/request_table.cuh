// Where the rows of a step's requests lie, in host memory that the host writes before every launch. The layout is that
// of kernels/request_table.py.
#pragma once

#include "ptx.cuh"

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
    Request requests[1];  // num_requests, at most one for each thread of a CTA

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
};
static_assert(sizeof(Request) == 48);
