// Which tile comes next: one persistent walk for both layouts, driven by offsets or counts that stay on the device.
#pragma once

#include "ptx.cuh"

enum class Layout { kContiguous, kMasked };

// One output tile of a cluster: `rows` rows of one group against kTileN columns.
struct alignas(16) Tile {
    int group;
    int row;     // first row: in all of `a` (contiguous) or within its group (masked)
    int rows;    // 1 .. kTileM, all of this group; -1: there are no more tiles
    int column;  // first output column of the cluster's tile
};

// What the scheduler keeps in shared memory behind the pipeline, 2 * (num_groups + 1) ints: the number of tiles before
// each group [num_groups + 1], then offsets [num_groups + 1] or counts [num_groups].
template <Layout kLayout, int kTileM, int kTileN, int kHeightStep>
class TileScheduler {
  public:
    // Every thread of the CTA calls this once. Extents outside [0, limit] are clamped: they must not become stores
    // outside `out`. `scratch` holds one int a warp.
    static __device__ void build(int* table, const int* extents, int num_groups, int n, int limit, int* scratch) {
        const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int tiles_n = (n + kTileN - 1) / kTileN;
        int *first_unit = table, *table_extents = table + num_groups + 1;
        if (threadIdx.x == 0) first_unit[0] = 0;
        int carry = 0;
        for (int base = 0; base < num_groups; base += blockDim.x) {
            const int group = base + threadIdx.x;
            int rows = 0;
            if (group < num_groups) {
                const int extent = min(max(extents[group], 0), limit);
                table_extents[group] = rows = extent;
                if constexpr (kLayout == Layout::kContiguous) {
                    const int end = min(max(extents[group + 1], extent), limit);
                    if (group == num_groups - 1) table_extents[num_groups] = end;
                    rows = end - extent;
                }
            }
            int sum = (rows + kTileM - 1) / kTileM * tiles_n;
            for (int distance = 1; distance < 32; distance *= 2) {
                const int below = __shfl_up_sync(0xffffffff, sum, distance);
                if (lane >= distance) sum += below;
            }
            if (lane == 31) scratch[warp] = sum;
            __syncthreads();
            for (int i = 0; i < num_warps; ++i) {
                if (i < warp) sum += scratch[i];
            }
            if (group < num_groups) first_unit[group + 1] = carry + sum;
            __syncthreads();
            carry = first_unit[min(base + static_cast<int>(blockDim.x), num_groups)];
        }
    }

    __device__ TileScheduler(const int* table, int num_groups, int n) : table_(table), num_groups_(num_groups), n_(n) {}

    // The tile of this number, from 0 on. A whole warp calls this together.
    __device__ Tile tile(int number) const {
        if (number >= table_[num_groups_]) return {0, 0, -1, 0};
        const int tiles_n = (n_ + kTileN - 1) / kTileN;
        const int group = find_group(number);
        const int* extent = table_ + num_groups_ + 1 + group;
        int row = 0, rows = extent[0];
        if constexpr (kLayout == Layout::kContiguous) {
            row = rows;
            rows = extent[1] - row;
        }
        const int steps = (rows + kHeightStep - 1) / kHeightStep;
        const int tiles_m = (steps + kTileM / kHeightStep - 1) / (kTileM / kHeightStep);

        // Bands of kBand row tiles, columns outside rows: what runs at once shares both operands in L2.
        const int local = number - table_[group];
        const int band = local / (kBand * tiles_n);
        const int within = local - band * kBand * tiles_n;
        const int width = min(kBand, tiles_m - band * kBand);
        const int tile_n = within / width;
        const int tile_m = band * kBand + within - tile_n * width;

        // Heights differ by one step at most: 600 rows are 192 + 192 + 128 + 88, not 3 * 192 + 24.
        const int height = steps / tiles_m, taller = steps - height * tiles_m;
        const int first = (tile_m * height + min(tile_m, taller)) * kHeightStep;
        return {group, row + first, min((height + (tile_m < taller)) * kHeightStep, rows - first), tile_n * kTileN};
    }

  private:
    static constexpr int kBand = 8;

    // The group of a tile, by two ballots over the running sums (num_groups <= 1024).
    __device__ int find_group(int number) const {
        const int lane = threadIdx.x % 32;
        const int coarse = 32 * (lane + 1);
        const bool passed = coarse <= num_groups_ && table_[coarse] <= number;
        const int base = 32 * __popc(__ballot_sync(0xffffffff, passed));
        const int fine = base + 1 + lane;
        return base + __popc(__ballot_sync(0xffffffff, fine <= num_groups_ && table_[fine] <= number));
    }

    const int* const table_;
    const int num_groups_, n_;
};
