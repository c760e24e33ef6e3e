// Memory that all ranks of an expert-parallel layer read and write, and what orders their accesses.
//
// In a call each rank first writes its tokens to the ranks that hold their experts. After its last write each CTA adds
// one to its rank's counter in every rank's memory, so a rank's tokens have arrived when its counter has grown by the
// number of its CTAs, which all ranks know. The sums go back without counters: before a call, kNothing stands wherever
// one will be written, which no rounded number equals. Who takes a sum puts kNothing back. A rank begins a call once
// all ranks are done with the tokens of the call before, which a second counter says.
#pragma once

#include "ptx.cuh"

enum Event { DISPATCHED, CONSUMED };

constexpr int kMaxRanks = 8;
constexpr int kCounterStride = 32;    // u32: each counter has a cache line of its own
constexpr u32 kNothing = 0xffffffff;  // two bf16 NaNs with all bits set; rounding makes only the NaN 0x7fff

// The memory of one rank; every rank has one of the same layout. Sizes are those of kernels/rank_memory.py.
struct RankMemory {
    u64 counters;      // u32 [2 events][kMaxRanks][kCounterStride], of each rank
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
    u32 reached[2][kMaxRanks];  // what the counters are, at least, after the event in the current call
    u32 done, unused;           // CTAs of return_rows that are done with the tokens
    u64 status;                 // u32 in pinned host memory: 0, or 1 + the rank that was waited for in vain
    u64 timeout;                // nanoseconds
    u64 max_own_tokens;

    __device__ __forceinline__ const RankMemory& own() const { return memory[rank]; }

    __device__ __forceinline__ u32* counter(u32 owner, Event event, u32 source) const {
        return reinterpret_cast<u32*>(memory[owner].counters) + (event * kMaxRanks + source) * kCounterStride;
    }

    // Tells all ranks of an event; called by all threads of a CTA, after the writes that come before it.
    __device__ __forceinline__ void announce(Event event) const {
        __syncthreads();  // orders the CTA's writes before those that follow
        if (threadIdx.x < num_ranks) ptx::add_release_system(counter(threadIdx.x, event, rank), 1);
    }

    // Waits until an event has come on every rank; called by all threads of a CTA.
    __device__ __forceinline__ void wait(Event event) const {
        if (threadIdx.x < num_ranks) {
            const u32* const place = counter(rank, event, threadIdx.x);
            const u32 wanted = reached[event][threadIdx.x];
            const u64 until = ptx::global_nanoseconds() + timeout;
            while (static_cast<int>(ptx::load_acquire_system(place) - wanted) < 0 && !is_late(until, threadIdx.x)) {
            }
        }
        __syncthreads();
    }

    // Says that a call has begun whose tokens all ranks will be done with. No launch may be waiting for CONSUMED: a CTA
    // that starts late would wait for the call it belongs to.
    __device__ __forceinline__ void expect_consumed() {
        if (threadIdx.x < num_ranks) reached[CONSUMED][threadIdx.x] += 1;
    }

    // What `source` writes to `place`, once it is there; `four` was there before. The caller puts kNothing back.
    __device__ __forceinline__ uint4 wait_for(uint4 four, const uint4* place, u32 source, u64 until) const {
        while (is_missing(four) && !is_late(until, source)) four = ptx::load_relaxed_system(place);
        return four;
    }

  private:
    static __device__ __forceinline__ bool is_missing(uint4 four) {
        return four.x == kNothing || four.y == kNothing || four.z == kNothing || four.w == kNothing;
    }

    // Whether it is time to give up waiting for a rank; if so, notes which.
    __device__ __forceinline__ bool is_late(u64 until, u32 source) const {
        if (ptx::global_nanoseconds() < until) return false;
        ptx::store_release_system(reinterpret_cast<u32*>(status), source + 1);
        return true;
    }
};
