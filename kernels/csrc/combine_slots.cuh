// Each permuted row goes back as it is, and the token's rank adds up all of them: in fp32 and in the order of the
// token's slots, which gives the bits of unpermute_rows.cu.
#pragma once

#include "combine.cuh"

namespace combine {

struct Rows {
    static constexpr int kAtOnce = 4;  // rows whose loads are in flight together

    // A slot of the token in each lane.
    struct Fetched {
        int row = -1;    // on this rank
        int id = -1;     // of the expert, for an own token
        int place = -1;  // likewise
        float weight = 0.0f;
    };

    const Items& items;

    __device__ __forceinline__ Fetched fetch(Item item, int first = 0) const {
        const Problem& problem = items.problem;
        const int slot = first + static_cast<int>(threadIdx.x % 32);
        Fetched fetched;
        if (!items.exists(item) || slot >= problem.top_k) return fetched;
        fetched.row = problem.inverse_permutation[items.pairs(item) + slot];
        if (!items.completes(item)) return fetched;
        fetched.id = items.own_id(item, slot);
        fetched.place = items.place_of(fetched.id);
        fetched.weight = items.own_weight(item, slot);
        return fetched;
    }

    __device__ __forceinline__ void run(Item item, Fetched fetched) const {
        float sum[8] = {};
#pragma unroll 1
        for (int first = 0; first < items.problem.top_k; first += 32) {
            if (first > 0) fetched = fetch(item, first);
            const i64 slots = static_cast<i64>(items.token(item)) * items.problem.top_k + first;
            if (items.completes(item))
                add(sum, slots, fetched);
            else
                give_back(items.owner(item), slots, fetched.row);
        }
        if (!items.completes(item) || items.column >= items.problem.n) return;
        const i64 index = static_cast<i64>(items.token(item)) * items.problem.n + items.column;
        floats::store<kDatatype>(items.problem.out, index, sum);
    }

  private:
    // This thread's columns of a slot's row, in the memory of the token's rank.
    __device__ __forceinline__ uint4* place(u32 owner, i64 slot) const {
        return reinterpret_cast<uint4*>(items.partial_sums(owner, slot) + items.column);
    }

    // Writes the rows of a token's slots to its rank. `slots`: the first of them, among those of the rank's tokens.
    __device__ __forceinline__ void give_back(u32 owner, i64 slots, int row) const {
        u32 left = __ballot_sync(0xffffffff, row >= 0);
#pragma unroll 1
        while (left != 0) {
            uint4 columns[kAtOnce];
            u32 later = left;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i, later &= later - 1) {
                const int from = __shfl_sync(0xffffffff, row, __ffs(static_cast<int>(later)) - 1);
                if (later != 0 && items.column < items.problem.n) columns[i] = *items.computed(from);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i, left &= left - 1) {
                if (left == 0 || items.column >= items.problem.n) continue;
                const int slot = __ffs(static_cast<int>(left)) - 1;
                ptx::store_relaxed_system(place(owner, slots + slot), columns[i]);
            }
        }
    }

    // Adds the rows of an own token's slots, wherever they were computed.
    __device__ __forceinline__ void add(float (&sum)[8], i64 slots, const Fetched& fetched) const {
        const Ranks& ranks = items.ranks;
        u32 left = __ballot_sync(0xffffffff, fetched.place >= 0);
#pragma unroll 1
        while (left != 0) {
            uint4 columns[kAtOnce];
            u32 source[kAtOnce];
            u32 later = left;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i, later &= later - 1) {
                const int slot = __ffs(static_cast<int>(later)) - 1;
                const int row = __shfl_sync(0xffffffff, fetched.row, slot);
                source[i] = static_cast<u32>(__shfl_sync(0xffffffff, fetched.place, slot)) >> 16;
                columns[i] = {0, 0, 0, 0};
                const bool is_own = source[i] == ranks.rank;
                // After a rank was late, an own pair may have no row.
                if (later == 0 || items.column >= items.problem.n || (is_own && row < 0)) continue;
                columns[i] = is_own ? *items.computed(row) : ptx::load_relaxed_system(place(ranks.rank, slots + slot));
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i, left &= left - 1) {
                const int slot = __ffs(static_cast<int>(left)) - 1;
                const float weight = __shfl_sync(0xffffffff, fetched.weight, slot);
                const int id = kBiased ? __shfl_sync(0xffffffff, fetched.id, slot) : 0;
                if (left == 0 || items.column >= items.problem.n) continue;
                uint4 bias;  // is on its way while this waits
                if constexpr (kBiased) bias = items.bias(id);
                if (source[i] != ranks.rank) {
                    uint4* const there = place(ranks.rank, slots + slot);
                    columns[i] = ranks.wait_for(columns[i], there, source[i], items.until);
                    *there = {kNothing, kNothing, kNothing, kNothing};
                }
                float value[8];
                floats::unpack<true>(value, columns[i]);
                if constexpr (kBiased) {
                    float added[8];
                    floats::unpack<true>(added, bias);
#pragma unroll
                    for (int j = 0; j < 8; ++j) value[j] += added[j];
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += weight * value[j];
            }
        }
    }
};

}  // namespace combine
