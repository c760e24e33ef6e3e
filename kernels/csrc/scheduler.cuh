// Dynamic persistent scheduling: maps tile numbers to tiles in both layouts, from offsets or counts on the device.
#pragma once

#include "config.cuh"

// One output tile of a cluster: `rows` rows of one group against kTileN columns.
struct alignas(16) Tile {
    int group;
    int row;     // first row: in all of `a` (contiguous) or within its group (masked)
    int rows;    // 1 .. kBlockM, all of this group; -1: no more tiles
    int column;  // first output column of the cluster's tile
};

// How rows are cut into tiles; the host plans it from the expected number of rows.
struct Cut {
    int tile_steps;  // average height of a tile, in sixteenths of a step
    int tall_first;  // a group's taller tiles come before its others
};

// The columns of out that a launch computes; `first` is a multiple of kTileN.
struct Columns {
    int first, count;
};

// The groups of a launch, and what it computes of them.
struct Groups {
    const int* extents;  // offsets [num_groups + 1] or counts [num_groups]
    int num_groups;
    int n, k;            // of each
    int max_rows;        // M, or max_m; extents outside [0, max_rows] are clamped: no store may miss `out`
    int rows_per_group;  // max_m, or 0 in the contiguous layout
    Cut cut;
    Columns columns;
};

// Used by a whole warp and kept in its registers, a lane for each group: nothing is loaded before a launch's first tile
// is known, which keeps start-up latency low. More than 32 groups are looked at 32 at a time.
class Scheduler {
  public:
    __device__ __forceinline__ Scheduler(int num_groups, int max_rows, Columns columns, Cut cut)
        : num_groups_(num_groups), max_rows_(max_rows), columns_(columns), cut_(cut) {}

    // Reads the extents, and copies more than 32 of them to `table` in shared memory.
    __device__ __forceinline__ void read(const int* group_extents, int* table) {
        extents_ = group_extents;
        if (num_groups_ > 32) {
            ptx::copy_by_warp(table, group_extents, num_groups_ + kContiguous);
            extents_ = table;
        }
#pragma unroll 1
        for (int chunk = 0; chunk * 32 < num_groups_; ++chunk) {
            look_at(chunk, total_);
            total_ = __shfl_sync(0xffffffff, through_, 31);
            if (lane() == chunk) chunk_through_ = total_;
        }
    }

    // The tile with this number, from 0 on.
    __device__ __forceinline__ Tile tile(int number) {
        if (number >= total_) return {0, 0, -1, 0};
        const int chunk = __popc(__ballot_sync(0xffffffff, chunk_through_ <= number));
        if (chunk != chunk_) look_at(chunk, chunk == 0 ? 0 : __shfl_sync(0xffffffff, chunk_through_, chunk - 1));

        // -- the group
        const int of = __popc(__ballot_sync(0xffffffff, through_ <= number));
        const int begin = __shfl_sync(0xffffffff, begin_, of), rows = __shfl_sync(0xffffffff, rows_, of);
        const int count = __shfl_sync(0xffffffff, count_, of), height = __shfl_sync(0xffffffff, height_, of);
        int within = number - __shfl_sync(0xffffffff, through_, of) + count * tiles_n_;
        const int steps = (rows + kHeightStep - 1) / kHeightStep, taller = steps - height * count;

        // -- bands of kBand row tiles, each band column by column: tiles that run at once share both operands in L2
        int first = 0, tiles_m = count;  // row tiles of this part of the group
        if (cut_.tall_first) {
            tiles_m = taller;
            if (within >= taller * tiles_n_) {
                within -= taller * tiles_n_;
                first = taller;
                tiles_m = count - taller;
            }
        }
        int band = 0;  // the quotient of larger numbers may be off by one
        if (tiles_m > kBand) {
            band = ptx::approximate_quotient(within, kBand * tiles_n_);
            const int rest = within - band * kBand * tiles_n_;
            band += (rest >= kBand * tiles_n_) - (rest < 0);
            within -= band * kBand * tiles_n_;
        }
        const int width = min(kBand, tiles_m - band * kBand);
        const int column = ptx::approximate_quotient(within, width);  // exact: the host limits n (MAX_N)
        const int index = first + band * kBand + within - column * width;
        const int row = (index * height + min(index, taller)) * kHeightStep;
        return {chunk * 32 + of, begin + row, min((height + (index < taller)) * kHeightStep, rows - row),
                columns_.first + column * kTileN};
    }

  private:
    static constexpr int kBand = 8;

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

    __device__ __forceinline__ int extent(int index) const {
        return min(max(ptx::load_relaxed(extents_ + index), 0), max_rows_);
    }

    // Loads a chunk of 32 groups; `before`: the tiles of earlier chunks. A group's tiles differ by at most one step in
    // height: with three steps per tile, 600 rows become 192 + 192 + 128 + 88, not 3 * 192 + 24.
    __device__ __forceinline__ void look_at(int chunk, int before) {
        chunk_ = chunk;
        const int group = chunk * 32 + lane();
        begin_ = rows_ = 0;
        if (group < num_groups_) {
            rows_ = extent(group);
            if constexpr (kContiguous) {
                const int end = extent(group + 1);
                begin_ = rows_;
                rows_ = max(end - begin_, 0);
            }
        }
        const int steps = (rows_ + kHeightStep - 1) / kHeightStep;
        count_ = ptx::approximate_quotient(16 * steps + cut_.tile_steps - 1, cut_.tile_steps);
        count_ += count_ * cut_.tile_steps < 16 * steps;  // else a tile would be too tall
        // One tile too many does no harm, but an empty one would end its cluster.
        count_ = min(count_, steps);
        height_ = ptx::approximate_quotient(steps, max(count_, 1));
        height_ -= height_ * count_ > steps;
        through_ = before + ptx::warp_prefix_sum(count_ * tiles_n_);
    }

    const int num_groups_, max_rows_;
    const Columns columns_;
    const int tiles_n_ = (columns_.count + kTileN - 1) / kTileN;
    const Cut cut_;
    const int* extents_ = nullptr;
    int chunk_through_ = 0x7fffffff;  // a lane for each 32 groups: the number of tiles up to their end
    int total_ = 0;                   // tiles of all groups
    // The 32 groups looked at: this lane's rows, its tiles down a column, and steps of a shorter one.
    int chunk_ = 0, begin_ = 0, rows_ = 0, count_ = 0, height_ = 0;
    int through_ = 0;  // tiles up to the end of this lane's group
};
