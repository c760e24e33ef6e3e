// Quantizes this rank's tokens, and writes each to its permuted rows here and to the other ranks that hold its experts;
// copies the tokens that arrive from those to their permuted rows. e4m3 with an fp32 scale per row and 128 columns.
// With DATATYPE=E4M3 the tokens are quantized already: k bytes of values, then the row's k / 128 scales.
//
// The arithmetic is that of quantize_permute.cu: the same bits as on one GPU. A CTA sends a token, then copies one of
// each other rank from its step before, which has had that time to arrive. With few tokens, each of these has a CTA of
// its own.
#include "permuted_rows.cuh"
#include "quantize.cuh"
#include "ranks.cuh"

constexpr int kThreads = 128;
constexpr int kColumns = kThreads * quantize::kEach;  // of a token, per CTA and step
constexpr auto kDatatype = floats::DATATYPE;

// A caller's four values, or its scale: kNothing, which is NaN, would say that nothing has arrived, so another NaN.
__device__ __forceinline__ u32 arriving(u32 word, u32 nan) { return word == kNothing ? nan : word; }

struct Problem {
    const void* hidden_states;       // [num_tokens of this rank, k], contiguous; e4m3: rows of k + k / 32 bytes
    const int* topk_ids;             // [num_tokens of this rank, top_k]; others name no expert
    const int* inverse_permutation;  // [num_tokens of all ranks, top_k], -1: no row
    const int* place_of;             // [num_experts]: rank * 65536 + group of each expert
    int num_experts, top_k, k;
    u8* data;       // e4m3 [rows, k]
    float* scales;  // fp32 [ceil(k / 128), scale_stride]
    u32 scale_stride;

    __device__ __forceinline__ void write(const PermutedRows& rows, uint4 columns, float scale, int column) const {
        rows.write(columns, scale, column, k, data, scales, scale_stride);
    }
};

struct Dispatch {
    const Ranks& ranks;
    const int* firsts;  // [kMaxRanks + 1]: rank r has the tokens from firsts[r] on
    const Problem& problem;
    int column;
    u64 until;

    __device__ __forceinline__ int tokens(u32 rank) const { return firsts[rank + 1] - firsts[rank]; }

    __device__ __forceinline__ quantize::Row load(int token) const {
        quantize::Row row;
        const bool valid = token < tokens(ranks.rank) && column < problem.k;
        if constexpr (kDatatype == floats::E4M3) {
            if (valid) {
                const u8* const from = static_cast<const u8*>(problem.hidden_states) +
                                       static_cast<i64>(token) * (problem.k + problem.k / 32);
                const uint4 columns = *reinterpret_cast<const uint4*>(from + column);
                const u32 words[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) row.words[i] = arriving(words[i], 0x7f7f7f7f);
                const u32 scale = *reinterpret_cast<const u32*>(from + problem.k + column / floats::kScaleBlock * 4);
                row.scale = __uint_as_float(arriving(scale, 0x7fffffff));
            }
        } else {
            row.load<kDatatype>(problem.hidden_states, static_cast<i64>(token) * problem.k + column, valid);
        }
        return row;
    }

    // An own token, to the other ranks and to its rows here. Called by whole warps.
    __device__ __forceinline__ void send(int token, const quantize::Row& row) const {
        u32 wanted = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 1
        for (int slot = static_cast<int>(threadIdx.x % 32), first = 0; first < problem.top_k; slot += 32, first += 32) {
            const int id = slot < problem.top_k ? problem.topk_ids[static_cast<i64>(token) * problem.top_k + slot] : -1;
            const int at = static_cast<u32>(id) < static_cast<u32>(problem.num_experts) ? problem.place_of[id] : -1;
            wanted |= __reduce_or_sync(0xffffffff, at >= 0 ? 1u << (at >> 16) : 0);
        }
        if (column >= problem.k) return;
        const i64 among_all = static_cast<i64>(firsts[ranks.rank]) + token;
        u32 to = ranks.rank;
#pragma unroll 1
        for (u32 i = 1; i < ranks.num_ranks; ++i) {  // not all ranks to the same one at once
            to = to + 1 == ranks.num_ranks ? 0 : to + 1;
            if ((wanted >> to & 1) == 0) continue;
            ptx::store_relaxed_system(data(to, among_all), row.packed());
            if (threadIdx.x % 8 == 0) ptx::store_relaxed_system(scale(to, among_all), __float_as_uint(row.scale));
        }
        if ((wanted >> ranks.rank & 1) == 0) return;
        PermutedRows rows;
#pragma unroll 1
        for (int first = 0; first < problem.top_k; first += rows.kAtOnce) {
            rows.load(problem.inverse_permutation + among_all * problem.top_k + first, problem.top_k - first);
            problem.write(rows, row.packed(), row.scale, column);
        }
    }

    // A token of rank `source`, if it comes to this rank.
    __device__ __forceinline__ void receive(u32 source, int token) const {
        if (column >= problem.k) return;
        const i64 among_all = static_cast<i64>(firsts[source]) + token;
        uint4* const place = data(ranks.rank, among_all);
        u32* const scale_place = scale(ranks.rank, among_all);
        uint4 columns = ptx::load_relaxed_system(place);
        u32 scale = ptx::load_relaxed_system(scale_place);
        bool is_here = false;
        PermutedRows rows;
#pragma unroll 1
        for (int first = 0; first < problem.top_k; first += rows.kAtOnce) {
            rows.load(problem.inverse_permutation + among_all * problem.top_k + first, problem.top_k - first);
            if (!is_here && rows.any()) {
                is_here = true;
                columns = ranks.wait_for(columns, place, source, until);
                *place = {kNothing, kNothing, kNothing, kNothing};
                if (threadIdx.x % 8 == 0) {
                    scale = ranks.wait_for(scale, scale_place, source, until);
                    *scale_place = kNothing;
                }
            }
            problem.write(rows, columns, __uint_as_float(scale), column);
        }
    }

  private:
    __device__ __forceinline__ uint4* data(u32 owner, i64 token) const {
        return reinterpret_cast<uint4*>(ranks.memory[owner].data + token * problem.k + column);
    }
    __device__ __forceinline__ u32* scale(u32 owner, i64 token) const {
        const int blocks = (problem.k + floats::kScaleBlock - 1) / floats::kScaleBlock;
        return reinterpret_cast<u32*>(ranks.memory[owner].scales) + token * blocks + column / floats::kScaleBlock;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 8)
    dispatch_rows(const Ranks* ranks_in_memory,
                  const int* __restrict__ first_tokens,  // [kMaxRanks + 1]
                  const int* __restrict__ places,        // [num_experts]
                  int num_experts, const void* __restrict__ hidden_states,
                  const int* __restrict__ topk_ids,  // see Problem
                  const int* inverse_permutation,    // likewise
                  int most,                          // tokens of a rank
                  int top_k, int k, u8* __restrict__ data, float* __restrict__ scales, u32 scale_stride  // see Problem
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;
    __shared__ int firsts[kMaxRanks + 1];
    copy_ranks(ranks, ranks_in_memory);
    copy_words(firsts, first_tokens, kMaxRanks + 1);
    copy_words(place_of, places, num_experts);
    __syncthreads();
    const Problem problem = {hidden_states, topk_ids, inverse_permutation, place_of, num_experts, top_k, k,
                             data,          scales,   scale_stride};
    const int parts = (k + kColumns - 1) / kColumns, index = static_cast<int>(blockIdx.x) / parts;
    const int column =
        static_cast<int>(blockIdx.x) % parts * kColumns + static_cast<int>(threadIdx.x) * quantize::kEach;
    const Dispatch dispatch = {ranks, firsts, problem, column, ranks.until()};
    const int num_ranks = static_cast<int>(ranks.num_ranks), rank = static_cast<int>(ranks.rank);
    const int each = static_cast<int>(gridDim.x) / parts;  // CTAs for the same columns
    const int own_tokens = dispatch.tokens(ranks.rank);
    if (each >= most * num_ranks) {
        const int token = index / num_ranks, source = index % num_ranks;
        if (source == rank) {
            const quantize::Row row = dispatch.load(token);
            ptx::grid_dependency_wait();  // inverse_permutation may not be complete yet; the tokens are
            ptx::launch_dependents();
            if (token < own_tokens) dispatch.send(token, row);
        } else {
            ptx::grid_dependency_wait();
            ptx::launch_dependents();
            if (token < dispatch.tokens(source)) dispatch.receive(source, token);
        }
        return;
    }
    int token = index;
    quantize::Row row = dispatch.load(token);
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
#pragma unroll 1
    for (; token < most + each; token += each) {
        if (token < own_tokens) {
            if (token != index) row = dispatch.load(token);
            dispatch.send(token, row);
        }
        const int before = token - each;
        int source = rank;
#pragma unroll 1
        for (int i = 1; i < num_ranks; ++i) {
            source = source + 1 == num_ranks ? 0 : source + 1;
            if (before >= 0 && before < dispatch.tokens(source)) dispatch.receive(source, before);
        }
    }
}
