// A caller's side of a call that its GPU makes by itself: two kernels, which CUDA graphs may have. device_call.ptx is
// this file, compiled for every GPU from sm_80 on by `python -m tests.kernels.device_call_ptx`.
using u32 = unsigned int;
using u64 = unsigned long long;

// In memory of the caller's GPU, one for each slot of the channel. The host writes it while no kernel uses it.
struct alignas(16) CallPlace {
    u64 header, hidden_states, topk_ids, topk_weights;  // in the memory of the server's GPU; header: of a u64
    u64 answer, out;                                    // in the caller's own, where the server's GPU writes
    // With `is_line`, all rows are in the caller's own memory; header and answer are the first words of a request line
    // and an answer line, in the host's.
    u64 failure;   // of a word of all slots of the channel: not 0: nothing is sent, and outputs are NaN
    u64 on_host;   // of a word in the host's memory, which gets the failure, too
    u64 limit;     // ns that an answer may take
    u64 sequence;  // of the last call
    u32 blocks;    // that have sent their part
    u32 holds;     // not 0: outputs are not NaN after a failure, but the stream goes no further
    u32 is_line;
    u32 unused;
};

// A call's header: its sequence (1, 2, 3, ... of its slot, modulo 2^40), model and num_tokens, 12 bits each.
constexpr int kFieldBits = 12, kSequenceShift = 2 * kFieldBits;
constexpr u64 kSequences = 1ull << (64 - kSequenceShift);
// A request line: its first word is the sequence alone, and the others are at these bytes.
constexpr u64 kNumTokensOffset = 8, kModelOffset = 60;

constexpr u32 kThreads = 256;
constexpr u32 kAtOnce = 4;              // loads of a thread that are in flight together
constexpr u64 kRefused = 1ull << 63;    // in an answer
constexpr u64 kLate = 1, kInvalid = 2;  // failures

__device__ __forceinline__ u64 load_acquire(u64 place) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_relaxed(u64 place) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u64 place, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(u64 place, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(u64 place, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Whether all other CTAs have come here before; the last one sees what they have seen, and leaves 0 for the next
// launch.
__device__ __forceinline__ bool is_last(u32* arrived) {
    if (gridDim.x == 1) return true;
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(arrived), "r"(gridDim.x - 1)
                 : "memory");
    return before == gridDim.x - 1;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// Up to kAtOnce vectors of a thread, which begins with the one of its number.
struct Vectors {
    uint4 loaded[kAtOnce];
    u32 first = blockIdx.x * kThreads + threadIdx.x;
    const u32 step = gridDim.x * kThreads, count;

    __device__ __forceinline__ explicit Vectors(u32 count) : count(count) {}

    __device__ __forceinline__ void load(const uint4* from) {
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i)
            if (first + i * step < count) loaded[i] = from[first + i * step];
    }

    __device__ __forceinline__ void fill(u32 word) {
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) loaded[i] = make_uint4(word, word, word, word);
    }

    // Returns whether there are more, for another load.
    __device__ __forceinline__ bool store(uint4* to) {
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i)
            if (first + i * step < count) to[first + i * step] = loaded[i];
        first += kAtOnce * step;
        return first < count;
    }
};

// Writes rows and routing, mostly to the server's GPU, then, by the last CTA, the header.
extern "C" __global__ void __launch_bounds__(kThreads)
    send_call(CallPlace* place,
              const uint4* hidden_states,  // bf16 [num_tokens, 8 * row]
              const int* topk_ids,         // [num_tokens, top_k]
              const float* topk_weights,   // likewise
              u32 num_tokens, u32 row, u32 top_k, u32 model) {
    // All that is loaded first is on its way before anything waits for it.
    Vectors rows(num_tokens * row);
    rows.load(hidden_states);
    const u32 thread = rows.first, pairs = num_tokens * top_k;
    int id = 0;
    float weight = 0.0f;
    if (thread < pairs) id = topk_ids[thread], weight = topk_weights[thread];
    const CallPlace at = *place;
    u64 failure = 0;
    if (threadIdx.x == 0) failure = load_relaxed(at.failure);
    int* const ids = reinterpret_cast<int*>(at.topk_ids);
    float* const weights = reinterpret_cast<float*>(at.topk_weights);
    if (thread < pairs) ids[thread] = id, weights[thread] = weight;
    while (rows.store(reinterpret_cast<uint4*>(at.hidden_states))) rows.load(hidden_states);
#pragma unroll 1
    for (u32 i = thread + rows.step; i < pairs; i += rows.step) {
        id = topk_ids[i], weight = topk_weights[i];
        ids[i] = id, weights[i] = weight;
    }
    __syncthreads();
    if (threadIdx.x > 0 || !is_last(&place->blocks)) return;
    const u64 sequence = (at.sequence + 1) % kSequences;
    place->sequence = sequence;
    if (at.is_line && failure == 0) {
        store_relaxed(at.header + kNumTokensOffset, num_tokens);
        store_relaxed(at.header + kModelOffset, model);
    }
    fence();  // after the parts of all CTAs
    if (failure != 0) return;
    const u64 header = sequence << kSequenceShift | static_cast<u64>(model) << kFieldBits | num_tokens;
    store_relaxed(at.header, at.is_line ? sequence : header);
}

// Waits for the answer, in the caller's own memory, and copies the output. Each CTA waits for itself.
extern "C" __global__ void __launch_bounds__(kThreads) wait_call(const CallPlace* place,
                                                                 uint4* out,  // bf16 [num_tokens, 8 * row]
                                                                 u32 count    // num_tokens * row
) {
    __shared__ u64 failed;
    const CallPlace at = *place;
    if (threadIdx.x == 0) {
        const u64 begin = nanoseconds();
        u64 failure;
        for (u32 look = 0;; ++look) {
            const u64 seen = load_acquire(at.answer);
            failure = seen == (at.sequence | kRefused) ? kInvalid : 0;
            if (seen == at.sequence || failure != 0) break;
            if (look % 16 == 0) {
                failure = load_relaxed(at.failure);
                if (failure == 0 && nanoseconds() - begin > at.limit) failure = kLate;
                if (failure != 0) break;
            }
        }
        if (failure != 0) {
            store_release(at.failure, failure);
            store_release(at.on_host, failure);
            while (at.holds != 0) asm volatile("nanosleep.u32 1000000;");
        }
        failed = failure;
    }
    __syncthreads();
    Vectors rows(count);
    if (rows.first >= count) return;
    do {
        rows.load(reinterpret_cast<const uint4*>(at.out));
        if (failed != 0) rows.fill(0xffffffff);  // NaN
    } while (rows.store(out));
}
