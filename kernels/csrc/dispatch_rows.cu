// Quantizes this rank's tokens, and writes each to its permuted rows here and to the other ranks that hold its experts;
// copies the tokens that arrive from those to their permuted rows. e4m3 with an fp32 scale per row and 128 columns.
// With DATATYPE=E4M3 the tokens are quantized already: k bytes of values, then the row's k / 128 scales.
//
// The arithmetic is that of quantize_permute.cu: the same bits as on one GPU. A CTA sends its next token before it
// copies those that arrive with the number of the last one. The first is sent while the permutation is still computed.
// With few tokens, several CTAs share what is to be done for one.
#include "quantize.cuh"
#include "ranks.cuh"

constexpr int kThreads = 128;
constexpr int kColumns = kThreads * quantize::kEach;     // of a token, by a CTA at once
constexpr int kScales = kColumns / floats::kScaleBlock;  // of those
constexpr auto kDatatype = floats::DATATYPE;

// A caller's four values, or its scale: kNothing, which is NaN, would say that nothing has arrived, so another NaN.
__device__ __forceinline__ u32 without_sentinel(u32 word, u32 nan) { return word == kNothing ? nan : word; }

struct Problem {
    const void* hidden_states;       // [own_rows, k], contiguous; e4m3: rows of k + k / 32 bytes
    const int* topk_ids;             // [own_rows, top_k]; ids out of range are ignored
    int own_rows;                    // of which the first ones are this rank's tokens
    const int* inverse_permutation;  // [num_tokens of all ranks, top_k], -1: no row
    const int* place_of;             // [num_experts]: rank * 65536 + group of each expert
    int num_experts, top_k, k;
    u8* data;       // e4m3 [rows, k]
    float* scales;  // fp32 [ceil(k / 128), scale_stride]
    u32 scale_stride;
};

// This thread's columns of a token, and what is known of its slots.
struct Own {
    quantize::Row row;
    int id = -1;  // of lane l's slot
};
struct IncomingToken {
    uint4 columns;
    u32 scale;
    int row;  // of lane l's slot
};

struct Dispatch {
    const Ranks& ranks;
    const int* firsts;  // [kMaxRanks + 1]: rank r has the tokens from firsts[r] on
    const Problem& problem;
    int column;
    u64 until;
    u32 (*to_send)[kScales];  // [2]: of every second token
    int* taken;               // [1]: the token that thread 0 has taken
    int parity = 0;

    __device__ __forceinline__ int tokens(u32 rank) const { return firsts[rank + 1] - firsts[rank]; }
    __device__ __forceinline__ bool has_columns() const { return column < problem.k; }
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

    // An own token. Needs no shared memory.
    __device__ __forceinline__ Own load(int token) const {
        Own own;
        if (token < problem.own_rows) own.id = id(token, lane());
        const bool valid = token < problem.own_rows && has_columns();
        if constexpr (kDatatype == floats::E4M3) {
            if (valid) {
                const u8* const from = static_cast<const u8*>(problem.hidden_states) +
                                       static_cast<i64>(token) * (problem.k + problem.k / 32);
                const uint4 columns = *reinterpret_cast<const uint4*>(from + column);
                const u32 words[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) own.row.words[i] = without_sentinel(words[i], 0x7f7f7f7f);
                const u32 scale = *reinterpret_cast<const u32*>(from + problem.k + column / floats::kScaleBlock * 4);
                own.row.scale = __uint_as_float(without_sentinel(scale, 0x7fffffff));
            }
        } else {
            own.row.load<kDatatype>(problem.hidden_states, static_cast<i64>(token) * problem.k + column, valid);
        }
        return own;
    }

    // Thread 0's token. Called by all threads; between two calls all of them synchronize.
    __device__ __forceinline__ int of_thread_0(int token) const {
        if (threadIdx.x == 0) *taken = token;
        __syncthreads();
        return *taken;
    }

    // Sends an own token to the other ranks. Called by all threads: a warp sends all scales, in one packet.
    __device__ __forceinline__ void send(int token, const Own& own) {
        parity ^= 1;
        if (threadIdx.x % 8 == 0) to_send[parity][threadIdx.x / 8] = __float_as_uint(own.row.scale);
        __syncthreads();
        if (token >= tokens(ranks.rank)) return;
        u32 wanted = 0;  // a bit per rank that holds an expert of the token
#pragma unroll 1
        for (int first = 0; first < problem.top_k; first += 32) {
            const int expert = first == 0 ? own.id : id(token, first + lane());
            const bool exists = static_cast<u32>(expert) < static_cast<u32>(problem.num_experts);
            const int at = exists ? problem.place_of[expert] : -1;
            wanted |= __reduce_or_sync(0xffffffff, at >= 0 ? 1u << (at >> 16) : 0);
        }
        if (!has_columns()) return;
        const i64 among_all = static_cast<i64>(firsts[ranks.rank]) + token;
        const int block = static_cast<int>(threadIdx.x), first_column = column - block * quantize::kEach;
        const bool has_scale = block < kScales && first_column + block * floats::kScaleBlock < problem.k;
        const u32 of_block = has_scale ? to_send[parity][block] : 0;
        u32 to = ranks.rank;
#pragma unroll 1
        for (u32 i = 1; i < ranks.num_ranks; ++i) {  // not all ranks to the same one at once
            to = to + 1 == ranks.num_ranks ? 0 : to + 1;
            if ((wanted >> to & 1) == 0) continue;
            ptx::store_relaxed_system(data(to, among_all), own.row.packed());
            if (has_scale) ptx::store_relaxed_system(scale(to, among_all, first_column) + block, of_block);
        }
    }

    // Lane l's permuted row, of a slot of a token of all ranks.
    __device__ __forceinline__ int permuted_row(i64 among_all, int first) const {
        const int slot = first + lane();
        return slot < problem.top_k ? problem.inverse_permutation[among_all * problem.top_k + slot] : -1;
    }

    // Writes an own token to its permuted rows here. Called by whole warps.
    __device__ __forceinline__ void write_own_rows(int token, const Own& own) const {
        if (token >= tokens(ranks.rank)) return;
        const i64 among_all = static_cast<i64>(firsts[ranks.rank]) + token;
#pragma unroll 1
        for (int first = 0; first < problem.top_k; first += 32)
            write(permuted_row(among_all, first), own.row.packed(), own.row.scale);
    }

    // Begins to receive a token of rank `source`.
    __device__ __forceinline__ IncomingToken fetch(u32 source, int token) const {
        IncomingToken incoming = {{}, 0, -1};
        if (token >= tokens(source)) return incoming;
        const i64 among_all = static_cast<i64>(firsts[source]) + token;
        incoming.row = permuted_row(among_all, 0);
        if (has_columns()) {
            incoming.columns = ptx::load_relaxed_system(data(ranks.rank, among_all));
            if (threadIdx.x % 8 == 0) incoming.scale = ptx::load_relaxed_system(scale(ranks.rank, among_all, column));
        }
        return incoming;
    }

    // Receives it, if it comes to this rank. Called by whole warps.
    __device__ __forceinline__ void receive(u32 source, int token, IncomingToken incoming) const {
        if (token >= tokens(source)) return;
        const i64 among_all = static_cast<i64>(firsts[source]) + token;
        bool is_here = !has_columns();
#pragma unroll 1
        for (int first = 0; first < problem.top_k; first += 32) {
            if (first > 0) incoming.row = permuted_row(among_all, first);
            const bool comes = __any_sync(0xffffffff, incoming.row >= 0);
            if (!is_here && comes) {
                is_here = true;
                wait(source, incoming, data(ranks.rank, among_all), scale(ranks.rank, among_all, column));
            }
            write(incoming.row, incoming.columns, __uint_as_float(incoming.scale));
        }
    }

  private:
    __device__ __forceinline__ int id(int token, int slot) const {
        return slot < problem.top_k ? problem.topk_ids[static_cast<i64>(token) * problem.top_k + slot] : -1;
    }

    // Waits for a token's columns and its scale, and clears their places.
    __device__ __forceinline__ void wait(u32 source, IncomingToken& incoming, uint4* columns_place,
                                         u32* scale_place) const {
        const bool has_scale = threadIdx.x % 8 == 0;
        ranks.wait_while_missing(until, [&]() -> u32 {
            const bool no_columns = Ranks::is_missing(incoming.columns),
                       no_scale = has_scale && Ranks::is_missing(incoming.scale);
            if (no_columns) incoming.columns = ptx::load_relaxed_system(columns_place);
            if (no_scale) incoming.scale = ptx::load_relaxed_system(scale_place);
            return no_columns || no_scale ? source + 1 : 0;
        });
        *columns_place = {kNothing, kNothing, kNothing, kNothing};
        if (has_scale) *scale_place = kNothing;
    }

    // Writes columns to the permuted rows that the lanes have. Called by whole warps.
    __device__ __forceinline__ void write(int rows, uint4 columns, float scale) const {
#pragma unroll 1
        for (u32 left = __ballot_sync(0xffffffff, rows >= 0); left != 0; left &= left - 1) {
            const i64 row = __shfl_sync(0xffffffff, rows, __ffs(static_cast<int>(left)) - 1);
            if (!has_columns()) continue;
            *reinterpret_cast<uint4*>(problem.data + row * problem.k + column) = columns;
            if (threadIdx.x % 8 == 0)
                problem.scales[static_cast<i64>(column / floats::kScaleBlock) * problem.scale_stride + row] = scale;
        }
    }

    __device__ __forceinline__ uint4* data(u32 owner, i64 token) const {
        return reinterpret_cast<uint4*>(ranks.memory[owner].data + token * problem.k + column);
    }
    __device__ __forceinline__ u32* scale(u32 owner, i64 token, int column) const {
        const int blocks = (problem.k + floats::kScaleBlock - 1) / floats::kScaleBlock;
        return reinterpret_cast<u32*>(ranks.memory[owner].scales) + token * blocks + column / floats::kScaleBlock;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, CTAS)
    dispatch_rows(const Ranks* ranks_in_memory, RANK_TOKENS,
                  const int* __restrict__ places,  // [num_experts]
                  int num_experts, const void* __restrict__ hidden_states, const int* __restrict__ topk_ids,
                  int own_rows,                    // see Problem
                  const int* inverse_permutation,  // likewise
                  int max_rank_tokens,             // tokens of a rank
                  int ctas_per_token,              // CTAs that share a token's columns
                  int* counters,                   // for each kColumns: tokens taken, 0 between launches
                  int top_k, int k, u8* __restrict__ data, float* __restrict__ scales, u32 scale_stride  // see Problem
    ) {
    extern __shared__ int place_of[];  // a copy of places
    __shared__ Ranks ranks;
    __shared__ int firsts[kMaxRanks + 1];
    __shared__ u32 to_send[2][kScales];
    __shared__ int taken;
    copy_ranks(ranks, ranks_in_memory);
    if (threadIdx.x == 0) write_firsts(firsts, tokens_0, tokens_3, tokens_6);
    copy_words(place_of, places, num_experts);
    const Problem problem = {hidden_states, topk_ids, own_rows,    inverse_permutation, place_of, num_experts, top_k, k,
                             data,          scales,   scale_stride};
    const int parts = (k + kColumns - 1) / kColumns, index = static_cast<int>(blockIdx.x) / parts;
    const int column =
        static_cast<int>(blockIdx.x) % parts * kColumns + static_cast<int>(threadIdx.x) * quantize::kEach;
    Dispatch dispatch = {ranks, firsts, problem, column, 0, to_send, &taken};
    // Item 0 of a token sends and keeps the own one, item i receives that of rank + i. This CTA has each
    // `ctas_per_token`-th.
    const int first = index % ctas_per_token, stride = static_cast<int>(gridDim.x) / parts / ctas_per_token;
    const bool sends = first == 0;
    int token = index / ctas_per_token;
    Own own;  // a token that is sent, and not kept yet
    if (sends) own = dispatch.load(token);
    ptx::wait_for_async_copies();
    __syncthreads();
    dispatch.until = ranks.until();
    if (sends) dispatch.send(token, own);
    ptx::grid_dependency_wait();  // inverse_permutation was not complete
    ptx::launch_dependents();
    const int num_ranks = static_cast<int>(ranks.num_ranks);
    const auto source = [&](int i) {
        const int other = static_cast<int>(ranks.rank) + i;
        return static_cast<u32>(other < num_ranks ? other : other - num_ranks);
    };
    // After a CTA's first token, the next one goes to whichever is ready for it: not all SMs send equally fast. Each
    // CTA takes one past the end, which wraps the counter to 0.
    const bool takes = stride < max_rank_tokens;
    int* const counter = counters + blockIdx.x % parts;
#pragma unroll 1
    while (token < max_rank_tokens) {
        int next = token + stride;
        if (takes && threadIdx.x == 0) next = stride + ptx::increment(counter, max_rank_tokens - 1);
        int i = sends ? ctas_per_token : first;
        IncomingToken incoming = {{}, 0, -1};
        if (i < num_ranks) incoming = dispatch.fetch(source(i), token);
        if (sends) {
            dispatch.write_own_rows(token, own);
            next = dispatch.of_thread_0(next);
            own = dispatch.load(next);
            dispatch.send(next, own);
        }
#pragma unroll 1
        for (; i < num_ranks; i += ctas_per_token) {
            const IncomingToken here = incoming;
            if (i + ctas_per_token < num_ranks) incoming = dispatch.fetch(source(i + ctas_per_token), token);
            dispatch.receive(source(i), token, here);
        }
        token = next;
    }
}
