// A caller's side of a call that its GPU makes by itself: two kernels, which CUDA graphs may have. device_call.ptx is
// this file, compiled for every GPU from sm_80 on by `python -m tests.kernels.device_call_ptx`.
using u32 = unsigned int;
using u64 = unsigned long long;

// In memory of the caller's GPU, one for each slot of the channel. The host writes it while no kernel uses it.
struct alignas(16) CallPlace {
    u64 header, hidden_states, topk_ids, topk_weights;  // in the memory of the server's GPU; header: a CallHeader
    u64 answer, out;                                    // in the caller's own, where the server's GPU writes
    u64 failure;            // of a word of all slots of the channel: not 0: nothing is sent, and outputs are NaN
    u64 on_host;            // of a word in the host's memory, which gets the failure, too
    u64 limit;              // ns that an answer may take
    u64 sequence;           // of the last call
    u32 blocks, unused[3];  // that have sent their part
};

struct alignas(16) CallHeader {
    u64 sequence;  // written last
    u32 num_tokens, model;
};

constexpr u32 kThreads = 256;
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

__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ u64 nanoseconds() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

template <typename T>
__device__ __forceinline__ void copy(u64 to, const T* from, u32 count) {
    for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads)
        reinterpret_cast<T*>(to)[i] = from[i];
}

// Writes rows and routing to the server's GPU, then, by the last CTA, the header.
extern "C" __global__ void __launch_bounds__(kThreads)
    send_call(CallPlace* place,
              const uint4* hidden_states,  // bf16 [num_tokens, 8 * row]
              const int* topk_ids,         // [num_tokens, top_k]
              const float* topk_weights,   // likewise
              u32 num_tokens, u32 row, u32 top_k, u32 model) {
    copy(place->hidden_states, hidden_states, num_tokens * row);
    copy(place->topk_ids, topk_ids, num_tokens * top_k);
    copy(place->topk_weights, topk_weights, num_tokens * top_k);
    fence();  // before this CTA counts as done
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(&place->blocks, 1) + 1 < gridDim.x) return;
    place->blocks = 0;
    const u64 sequence = ++place->sequence;
    if (load_relaxed(place->failure) != 0) return;
    CallHeader* const header = reinterpret_cast<CallHeader*>(place->header);
    *reinterpret_cast<volatile u64*>(&header->num_tokens) = static_cast<u64>(model) << 32 | num_tokens;
    fence();  // after the parts of all CTAs
    store_release(place->header, sequence);
}

// Waits for the answer, in the caller's own memory, and copies the output. Each CTA waits for itself.
extern "C" __global__ void __launch_bounds__(kThreads) wait_call(const CallPlace* place,
                                                                 uint4* out,  // bf16 [num_tokens, 8 * row]
                                                                 u32 count    // num_tokens * row
) {
    __shared__ u64 failure;
    if (threadIdx.x == 0) {
        const u64 wanted = place->sequence, begin = nanoseconds();
        for (u32 look = 0;; ++look) {
            const u64 seen = load_acquire(place->answer);
            failure = seen == (wanted | kRefused) ? kInvalid : 0;
            if (seen == wanted || failure != 0) break;
            if (look % 16 == 0) {
                failure = load_relaxed(place->failure);
                if (failure == 0 && nanoseconds() - begin > place->limit) failure = kLate;
                if (failure != 0) break;
            }
        }
        if (failure != 0) {
            store_release(place->failure, failure);
            store_release(place->on_host, failure);
        }
    }
    __syncthreads();
    const uint4* const rows = reinterpret_cast<const uint4*>(place->out);
    const uint4 nan = make_uint4(0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff);
    for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads)
        out[i] = failure != 0 ? nan : rows[i];
}
