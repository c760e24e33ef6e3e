// As combine_sums.cuh, for many wide tokens: a warp for each kColumns of a token, whose rows are copied to shared
// memory while it adds up those of the token before, and whose results are copied from there. It takes few
// instructions, and has many bytes in flight.
#pragma once

#include "combine_sums.cuh"

namespace combine {

struct StagedSums {
    static constexpr int kChunks = kColumns / (32 * 8);  // of 8 columns per lane
    static constexpr int kStages = 2;
    static constexpr int kEntries = 4;  // a token's rows, then other ranks' sums; the rest is loaded later

    struct Storage {
        uint4 columns[kStages][kEntries][kChunks][32];
        float results[kStages][kColumns];  // in kDatatype, or bf16 for another rank
        uint4 nothing[kChunks][32];
        u64 full[kStages];  // barriers
    };

    static_assert(!STAGED || sizeof(Storage) == STORAGE_BYTES);
    using Fetched = Sums::Fetched;

    // An item whose copies are on their way.
    struct Begun {
        Slots slots;
        u32 computed = 0;  // a bit per rank that holds an expert of an own token
    };

    const Items& items;
    const Sums sums;
    Storage& storage;
    const int first_column;
    const u32 bytes;  // of a row
    u32 phases = 0;   // a bit for each stage

    __device__ __forceinline__ StagedSums(const Items& items, Storage& storage)
        : items(items),
          sums{items},
          storage(storage),
          first_column(items.problem.first_column + static_cast<int>(blockIdx.x) % items.problem.parts() * kColumns),
          bytes(static_cast<u32>(min(kColumns, items.problem.end_column - first_column)) * sizeof(u16)) {
        if (threadIdx.x < kStages) {
            ptx::mbarrier_init(&storage.full[threadIdx.x], 1);
            ptx::fence_mbarrier_init();
        }
        for (int chunk = 0; chunk < kChunks; ++chunk)
            storage.nothing[chunk][threadIdx.x] = {kNothing, kNothing, kNothing, kNothing};
        ptx::fence_proxy_async();
        __syncwarp();
    }

    // Begins to copy what `run` needs.
    __device__ __forceinline__ Begun begin(Item item, const Fetched& fetched, int stage) const {
        Begun begun;
        u32 others = 0;
        if (items.exists(item)) {
            begun.slots = fetched.slots;
            if (items.completes(item)) {
                begun.computed = sums.ranks_of(item, fetched.id);
                others = begun.computed & ~(1u << items.ranks.rank);
            }
        }
        fill(stage, begun.slots.found(), begun.slots.row, others, items.token(item));
        return begun;
    }

    // Waits for a stage's copies.
    __device__ __forceinline__ void wait(int stage) {
        ptx::mbarrier_wait(&storage.full[stage], phases >> stage & 1);
        phases ^= 1u << stage;
    }

    // Instead of `run`, for a token that does not exist: an empty group keeps `results` in step with the stages.
    __device__ __forceinline__ void skip(int stage) {
        wait(stage);
        ptx::commit_bulk_stores();
    }

    // Adds up what has been copied, and begins to store the result.
    __device__ __forceinline__ void run(Item item, const Begun& begun, int stage) {
        Slots slots = begun.slots;
        u32 left = slots.found();
        int other_sums = __popc(left);  // the first of them among the entries
        bool any = left != 0;
        float sum[kChunks][8] = {};
        int first = 0;
#pragma unroll 1
        while (true) {
            wait(stage);
#pragma unroll 1
            for (int entry = 0; left != 0 && entry < kEntries; ++entry, left &= left - 1) {
                const float by = __shfl_sync(0xffffffff, slots.weight, __ffs(static_cast<int>(left)) - 1);
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    float value[8];
                    floats::unpack<true>(value, storage.columns[stage][entry][chunk][threadIdx.x]);
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[chunk][j] += by * value[j];
                }
            }
#pragma unroll 1
            while (left == 0 && (first += Slots::kMost) < items.problem.top_k) {
                slots = sums.slots(item, first);
                left = slots.found();
                any = any || left != 0;
            }
            if (left == 0) break;
            other_sums = kEntries;  // overwritten
            __syncwarp();
            fill(stage, left, slots.row, 0, 0);
        }
        void* const result = storage.results[stage];
        ptx::wait_bulk_stores_read<kStages - 1>();  // the last one that was here
        __syncwarp();
        if (items.completes(item)) {
            complete(sum, begun.computed, items.token(item), stage, other_sums);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
                floats::store<kDatatype>(result, chunk * 256 + threadIdx.x * 8, sum[chunk]);
            const i64 index = static_cast<i64>(items.token(item)) * items.problem.n + first_column;
            constexpr u32 kBytes = floats::kBytes<kDatatype>;
            store(static_cast<u8*>(items.problem.out) + index * kBytes, result, bytes / sizeof(u16) * kBytes);
        } else if (any) {
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
                floats::store<floats::BF16>(result, chunk * 256 + threadIdx.x * 8, sum[chunk]);
            store(sums.sum_of(items.owner(item), items.ranks.rank, items.token(item)) + first_column, result, bytes);
        }
        ptx::commit_bulk_stores();
    }

  private:
    // Begins to copy to a stage: lane l the row of its slot, if it is among `rows`, and the sum of rank l for an own
    // token, if it is among `others`; as many as fit.
    __device__ __forceinline__ void fill(int stage, u32 rows, int row, u32 others, int token) const {
        const u32 lower = (1u << threadIdx.x) - 1;
        const int entry = __popc(rows & lower), later = __popc(rows) + __popc(others & lower);
        u64* const full = &storage.full[stage];
        if (threadIdx.x == 0) {
            const int entries = min(__popc(rows) + __popc(others), kEntries);
            ptx::mbarrier_arrive_expect_bytes(full, static_cast<u32>(entries) * bytes);
        }
        __syncwarp();
        if ((rows >> threadIdx.x & 1) != 0 && entry < kEntries)
            ptx::bulk_load(full, storage.columns[stage][entry],
                           items.problem.rows + static_cast<i64>(row) * items.problem.n + first_column, bytes);
        if ((others >> threadIdx.x & 1) != 0 && later < kEntries)
            ptx::bulk_load(full, storage.columns[stage][later],
                           sums.sum_of(items.ranks.rank, threadIdx.x, token) + first_column, bytes);
    }

    // Stores what all lanes have written to shared memory.
    __device__ __forceinline__ void store(void* to, const void* result, u32 size) const {
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x == 0) ptx::bulk_store(to, result, size);
    }

    // Adds up the sums of the ranks in `computed`: of this one, `sum`; those of others are entries from `entry` on.
    __device__ __forceinline__ void complete(float (&sum)[kChunks][8], u32 computed, int token, int stage,
                                             int entry) const {
        const Ranks& ranks = items.ranks;
        uint4 own[kChunks];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            own[chunk] = floats::pack<true>(sum[chunk]);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[chunk][j] = 0.0f;
        }
#pragma unroll 1
        for (u32 left = computed; left != 0; left &= left - 1) {
            const u32 r = __ffs(static_cast<int>(left)) - 1;
            uint4 other[kChunks];
            if (r != ranks.rank) receive_sum(other, r, token, stage, entry++);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                float value[8];
                floats::unpack<true>(value, r == ranks.rank ? own[chunk] : other[chunk]);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[chunk][j] += value[j];
            }
        }
    }

    // A rank's sum for an own token, once it is there; puts kNothing in its place.
    __device__ __forceinline__ void receive_sum(uint4 (&to)[kChunks], u32 source, int token, int stage,
                                                int entry) const {
        u16* const there = sums.sum_of(items.ranks.rank, source, token);
        bool missing = entry >= kEntries;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            if (!missing) to[chunk] = storage.columns[stage][entry][chunk][threadIdx.x];
            if (items.column_of(chunk) < items.problem.n) missing = missing || Ranks::is_missing(to[chunk]);
        }
        while (__any_sync(0xffffffff, missing)) {
            missing = false;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
                if (items.column_of(chunk) < items.problem.n)
                    to[chunk] = ptx::load_relaxed_system(reinterpret_cast<uint4*>(there + items.column_of(chunk)));
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
                if (items.column_of(chunk) < items.problem.n) missing = missing || Ranks::is_missing(to[chunk]);
            missing = missing && !items.ranks.is_late(source, items.until);
        }
        if (threadIdx.x == 0) ptx::bulk_store(there + first_column, storage.nothing, bytes);
    }
};

// A CTA's items, one after the other. After its first token, the next one goes to whichever CTA is ready for it: not
// all SMs send equally fast. Each CTA takes one past the end, which wraps the counter to 0.
struct Turns {
    const Items& items;
    int* counter;
    int max_rank_tokens;  // tokens of a rank
    int token;            // lane 0: the next one

    __device__ __forceinline__ int end() const { return max_rank_tokens + items.lag; }

    __device__ __forceinline__ Item after(Item item) {
        const int num_ranks = static_cast<int>(items.ranks.num_ranks);
        item.other += items.ctas_per_token;
        const bool takes = item.other == max(num_ranks, 2) && items.stride < max_rank_tokens && item.token < end();
        if (takes && threadIdx.x == 0) token = items.stride + ptx::increment(counter, end() - 1);
        if (item.other <= num_ranks) return item;
        return {__shfl_sync(0xffffffff, token, 0), items.first().other};
    }
};

// As run_all. `counters`: for each kColumns of this launch, tokens taken; 0 between launches.
__device__ __forceinline__ void run_all_staged(const Items& items, int max_rank_tokens, int* counters, StagedSums how) {
    Item now = items.first();
    Turns turns = {items, counters + blockIdx.x % items.problem.parts(), max_rank_tokens, now.token + items.stride};
    auto fetched = how.sums.fetch(now);
    begin(items);
    // Bulk loads then see kNothing where earlier launches have put it. A sum that another rank writes meanwhile they
    // may miss: receive_sum loads it again.
    ptx::fence_proxy_async_global();
    Item next = turns.after(now);
    auto begun = how.begin(now, fetched, 0);
    fetched = how.sums.fetch(next);
    int stage = 0;
#pragma unroll 1
    while (now.token < turns.end()) {
        const auto begun_next = how.begin(next, fetched, stage ^ 1);
        const Item later = turns.after(next);
        fetched = how.sums.fetch(later);
        if (items.exists(now))
            how.run(now, begun, stage);
        else
            how.skip(stage);
        now = next, next = later;
        begun = begun_next;
        stage ^= 1;
    }
    ptx::commit_and_wait_bulk_stores();
}

}  // namespace combine
