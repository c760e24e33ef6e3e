// Each rank's weighted sum of a token's permuted rows goes back.
//
// It is in fp32 and in the order of the token's slots, and rounded to bf16; the sums of the ranks are added in fp32 and
// in the order of ranks. With kBiased they are added to the weighted biases of the token's experts: its own rank has
// the biases of all experts.
#pragma once

#include "combine.cuh"
#include "slots.cuh"

namespace combine {

struct Sums {
    static constexpr int kAtOnce = 4;  // ranks whose sums are loaded together

    struct Fetched {
        Slots slots;
        int id = -1;  // lane l: the expert in slot l, of an own token
    };

    const Items& items;

    __device__ __forceinline__ Slots slots(Item item, int first) const {
        const Problem& problem = items.problem;
        const int* const inverse = problem.inverse_permutation + items.pairs(item) + first;
        const int count = problem.top_k - first;
        Slots slots;
        if (items.completes(item)) {
            const i64 own = static_cast<i64>(items.token(item)) * problem.top_k + first;
            slots.load(inverse, problem.topk_weights + own, 1, count);
        } else {
            slots.load(inverse, &items.pairs_of(item)[first].weight, sizeof(Pair) / sizeof(float), count);
        }
        return slots;
    }

    __device__ __forceinline__ Fetched fetch(Item item) const {
        Fetched fetched;
        if (!items.exists(item)) return fetched;
        fetched.slots = slots(item, 0);
        if (items.completes(item)) fetched.id = items.own_id(item, static_cast<int>(threadIdx.x % 32));
        return fetched;
    }

    __device__ __forceinline__ void run(Item item, const Fetched& fetched) const {
        const Problem& problem = items.problem;
        float sum[8] = {};
        bool any = fetched.slots.any();
        fetched.slots.add(sum, problem.rows, problem.n, items.column);
#pragma unroll 1
        for (int first = Slots::kMost; first < problem.top_k; first += Slots::kMost) {
            const Slots more = slots(item, first);
            any = any || more.any();
            more.add(sum, problem.rows, problem.n, items.column);
        }
        const uint4 own = floats::pack<true>(sum);
        if (items.completes(item)) {
            const u32 computed = ranks_of(item, fetched.id);
            if (items.column < problem.n) complete(own, computed, item);
        } else if (any && items.column < problem.n) {
            ptx::store_relaxed_system(place(items.owner(item), items.ranks.rank, items.token(item)), own);
        }
    }

    // A bit per rank that holds an expert of the item's token.
    __device__ __forceinline__ u32 ranks_of(Item item, int id) const {
        u32 found = 0;
#pragma unroll 1
        for (int slot = static_cast<int>(threadIdx.x % 32), first = 0; first < items.problem.top_k; first += 32) {
            if (first > 0) id = items.own_id(item, slot + first);
            const int place = items.place_of(id);
            found |= __reduce_or_sync(0xffffffff, place >= 0 ? 1u << (place >> 16) : 0);
        }
        return found;
    }

    // Where rank `source` writes its sum for a token of `owner`.
    __device__ __forceinline__ u16* sum_of(u32 owner, u32 source, int token) const {
        return items.partial_sums(owner, source * static_cast<i64>(items.ranks.max_own_tokens) + token);
    }

  private:
    // This thread's columns of it.
    __device__ __forceinline__ uint4* place(u32 owner, u32 source, int token) const {
        return reinterpret_cast<uint4*>(sum_of(owner, source, token) + items.column);
    }

    // Adds the weighted biases of an own token's experts, wherever those are.
    __device__ __forceinline__ void add_biases(float (&sum)[8], Item item) const {
#pragma unroll 1
        for (int first = 0; first < items.problem.top_k; first += kAtOnce) {
            float by[kAtOnce];
            uint4 packed[kAtOnce];
#pragma unroll
            for (int i = 0; i < static_cast<int>(kAtOnce); ++i) {
                const int id = items.own_id(item, first + i);
                const bool exists = items.place_of(id) >= 0;
                by[i] = exists ? items.own_weight(item, first + i) : 0.0f;
                packed[i] = exists ? items.bias(id) : uint4{0, 0, 0, 0};
            }
#pragma unroll
            for (int i = 0; i < static_cast<int>(kAtOnce); ++i) {
                float value[8];
                floats::unpack<true>(value, packed[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += by[i] * value[j];
            }
        }
    }

    // Adds up the sums of the ranks in `computed`, of which `own` is this rank's.
    __device__ __forceinline__ void complete(uint4 own, u32 computed, Item item) const {
        const Ranks& ranks = items.ranks;
        const int token = items.token(item);
        float sum[8] = {};
        if constexpr (kBiased) add_biases(sum, item);
#pragma unroll 1
        for (u32 first = 0; first < ranks.num_ranks; first += kAtOnce) {
            uint4 four[kAtOnce];
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                const u32 r = first + i;
                four[i] = own;
                if (r != ranks.rank && computed >> r & 1)
                    four[i] = ptx::load_relaxed_system(place(ranks.rank, r, token));
            }
#pragma unroll
            for (u32 i = 0; i < kAtOnce; ++i) {
                const u32 r = first + i;
                if ((computed >> r & 1) == 0) continue;
                if (r != ranks.rank) {
                    uint4* const there = place(ranks.rank, r, token);
                    four[i] = ranks.wait_for(four[i], there, r, items.until);
                    *there = {kNothing, kNothing, kNothing, kNothing};
                }
                float value[8];
                floats::unpack<true>(value, four[i]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] += value[j];
            }
        }
        const i64 index = static_cast<i64>(token) * items.problem.n + items.column;
        floats::store<kDatatype>(items.problem.out, index, sum);
    }
};

}  // namespace combine
