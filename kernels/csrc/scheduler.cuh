// Dynamic persistent scheduling: maps tile numbers to tiles in both layouts, from offsets or counts on the device.
#pragma once

#include "ptx.cuh"

enum class Layout { kContiguous, kMasked };

// One output tile of a cluster: `rows` rows of one group against kTileN columns.
struct alignas(16) Tile {
    int group;
    int row;     // first row: in all of `a` (contiguous) or within its group (masked)
    int rows;    // 1 .. kTileM, all of this group; -1: no more tiles
    int column;  // first output column of the cluster's tile
};

// How rows are cut into tiles; the host plans it from the expected number of rows.
struct Cut {
    int tile_steps;  // average height of a tile, in sixteenths of a step
    int passes;      // 1: group after group; more: one per height, the tall tiles of all groups first
};

// The columns of out that a launch computes; `first` is a multiple of a tile's.
struct Columns {
    int first, count;
};

// The scheduler's table in shared memory, behind the pipeline: offsets [num_groups + 1] or counts [num_groups], then
// the number of tiles before each group of each pass [passes * num_groups + 1].
template <Layout kLayout, int kTileM, int kTileN, int kHeightStep>
class TileScheduler {
  public:
    // Built by a whole warp, in `table`. Extents outside [0, max_rows] are clamped: they must not become stores outside
    // `out`.
    __device__ TileScheduler(int* table, const int* group_extents, int num_groups, Columns columns, Cut cut,
                             int max_rows)
        : extents_(table), first_tile_(table + num_groups + 1), num_groups_(num_groups), columns_(columns), cut_(cut) {
        constexpr int kAtOnce = 8;  // loads per lane in flight
        const int lane = threadIdx.x % 32, tiles_n = (columns.count + kTileN - 1) / kTileN;
        const int last = kLayout == Layout::kContiguous ? num_groups : num_groups - 1;
        int *const extents = table, *first_tile = table + num_groups + 1;
#pragma unroll 1
        for (int start = 0; start <= last; start += 32 * kAtOnce) {
            const int base = start + lane;
            int found[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (base + i * 32 <= last) found[i] = __ldcg(group_extents + base + i * 32);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (base + i * 32 <= last) extents[base + i * 32] = min(max(found[i], 0), max_rows);
        }
        __syncwarp();
        int before = 0;
        if (lane == 0) *first_tile = 0;
#pragma unroll 1
        for (int pass = 0; pass < cut.passes; ++pass) {
#pragma unroll 1
            for (int base = 0; base < num_groups; base += 32) {
                const int group = base + lane;
                const int count = group < num_groups ? Group(rows_of(group), cut).tiles(pass, cut) * tiles_n : 0;
                const int sum = ptx::warp_prefix_sum(count);
                if (group < num_groups) first_tile[pass * num_groups + group + 1] = before + sum;
                before += __shfl_sync(0xffffffff, sum, 31);
            }
        }
        __syncwarp();
    }

    // The tile with this number, from 0 on. Called by a whole warp.
    __device__ Tile tile(int number) const {
        const int entries = cut_.passes * num_groups_;
        if (number >= first_tile_[entries]) return {0, 0, -1, 0};
        const int entry = find_entry(number, entries);
        int pass = 0, group = entry;
        for (; group >= num_groups_; group -= num_groups_) ++pass;
        const int row = kLayout == Layout::kContiguous ? extents_[group] : 0, rows = rows_of(group);
        const Group cut(rows, cut_);

        // Bands of kBand row tiles, each band column by column: tiles that run at once share both operands in L2.
        const int tiles_m = cut.tiles(pass, cut_), tiles_n = (columns_.count + kTileN - 1) / kTileN;
        const int local = number - first_tile_[entry];
        const int band = tiles_m > kBand ? local / (kBand * tiles_n) : 0;
        const int within = local - band * kBand * tiles_n;
        const int width = min(kBand, tiles_m - band * kBand);
        const int column = quotient(within, width);
        const int index = band * kBand + within - column * width + cut.before(pass, cut_);
        const int first = (index * cut.height + min(index, cut.taller)) * kHeightStep;
        return {group, row + first, min((cut.height + (index < cut.taller)) * kHeightStep, rows - first),
                columns_.first + column * kTileN};
    }

  private:
    static constexpr int kBand = 8;
    static constexpr int kMaxSteps = kTileM / kHeightStep;

    // a / b for 0 <= a < 2^24 and b > 0, in a tenth of the time of `/`: the first load of a launch waits for it.
    static __device__ __forceinline__ int quotient(int a, int b) {
        int q = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
        const int rest = a - q * b;
        return q + (rest >= b) - (rest < 0);
    }

    // Cuts a group's rows into tiles whose heights differ by at most one step: with three steps per tile, 600 rows
    // become 192 + 192 + 128 + 88, not 3 * 192 + 24.
    struct Group {
        int count, height, taller;  // tiles; steps of a shorter one; tiles that are one step taller, which come first

        __device__ Group(int rows, Cut cut) {
            const int steps = (rows + kHeightStep - 1) / kHeightStep;
            count = max(quotient(16 * steps + cut.tile_steps - 1, cut.tile_steps), (steps + kMaxSteps - 1) / kMaxSteps);
            height = quotient(steps, max(count, 1));
            taller = steps - height * count;
        }
        // Tiles of a pass: all of them, or those of its height.
        __device__ int tiles(int pass, Cut cut) const {
            if (cut.passes == 1) return count;
            return kMaxSteps - pass == height + 1 ? taller : kMaxSteps - pass == height ? count - taller : 0;
        }
        __device__ int before(int pass, Cut cut) const {
            return cut.passes > 1 && kMaxSteps - pass == height ? taller : 0;
        }
    };

    __device__ int rows_of(int group) const {
        if constexpr (kLayout == Layout::kMasked) return extents_[group];
        return max(extents_[group + 1] - extents_[group], 0);
    }

    // The entry that a tile belongs to, by two ballots over the running sums (at most 1024).
    __device__ int find_entry(int number, int entries) const {
        const int lane = threadIdx.x % 32;
        const int coarse = 32 * (lane + 1);
        const bool passed = coarse <= entries && first_tile_[coarse] <= number;
        const int base = 32 * __popc(__ballot_sync(0xffffffff, passed));
        const int fine = base + 1 + lane;
        return base + __popc(__ballot_sync(0xffffffff, fine <= entries && first_tile_[fine] <= number));
    }

    const int *const extents_, *const first_tile_;
    const int num_groups_;
    const Columns columns_;
    const Cut cut_;
};
