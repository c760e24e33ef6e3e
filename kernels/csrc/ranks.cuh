// Memory that all ranks of an expert-parallel layer read and write, and the counters that order their accesses.
//
// A call has two phases. In `dispatch` each rank writes its tokens to the ranks that hold their experts, in `combine`
// those write the results back. After its last write of a phase, each CTA adds one to its rank's counter in every
// rank's memory, so a rank has arrived when its counter has grown by the number of its CTAs, which all ranks know. A
// rank begins a call only after all results of the one before, so nobody is still reading what the call overwrites, and
// no other barrier is needed.
#pragma once

#include "ptx.cuh"

enum Phase { DISPATCH, COMBINE };

constexpr int kMaxRanks = 8;
constexpr int kCounterStride = 32;  // u32: each counter has a cache line of its own

// The memory of one rank; every rank has one of the same layout. Sizes are those of kernels/rank_memory.py.
struct RankMemory {
    u64 counters;      // u32 [2 phases][kMaxRanks][kCounterStride]: CTAs of each rank that have written all they write
    u64 group_ids;     // int32 [max_tokens, top_k]: groups of this rank, -1: no expert here
    u64 topk_weights;  // fp32 [max_tokens, top_k]
    u64 data;          // e4m3 [max_tokens, h]
    u64 scales;        // fp32 [max_tokens, h / 128]
    u64 partial_sums;  // bf16 [num_ranks, max_own_tokens, h]: of this rank's own tokens, by the rank that computed them
};

// The calling rank's view: all memories, and its own state.
struct Ranks {
    RankMemory memory[kMaxRanks];  // addresses in the caller's address space
    u32 num_ranks, rank;
    u32 arrived[2][kMaxRanks];  // what the counters are, at least, once all ranks have arrived in the current call
    u64 status;                 // u32 in pinned host memory: 0, or 1 + the rank that was waited for in vain
    u64 timeout;                // nanoseconds
    u64 max_own_tokens;

    __device__ __forceinline__ const RankMemory& own() const { return memory[rank]; }

    __device__ __forceinline__ u32* counter(u32 owner, Phase phase, u32 source) const {
        return reinterpret_cast<u32*>(memory[owner].counters) + (phase * kMaxRanks + source) * kCounterStride;
    }

    // Called by all threads of every CTA after its last write of a phase.
    __device__ __forceinline__ void announce(Phase phase) const {
        __syncthreads();  // orders the CTA's writes before those that follow
        if (threadIdx.x < num_ranks) ptx::add_release_system(counter(threadIdx.x, phase, rank), 1);
    }

    // Waits until every rank's writes of a phase have arrived; after the time limit it notes whom it waited for.
    __device__ __forceinline__ void wait(Phase phase) const {
        if (threadIdx.x < num_ranks) {
            const u32* const place = counter(rank, phase, threadIdx.x);
            const u32 wanted = arrived[phase][threadIdx.x];
            const u64 until = ptx::global_nanoseconds() + timeout;
            while (static_cast<int>(ptx::load_acquire_system(place) - wanted) < 0) {
                if (ptx::global_nanoseconds() > until) {
                    ptx::store_release_system(reinterpret_cast<u32*>(status), threadIdx.x + 1);
                    break;
                }
            }
        }
        __syncthreads();
    }
};
