// PTX of sm_90a behind plain functions: barriers, bulk tensor copies, warpgroup state. Nothing here is about GEMMs.
// Source: PTX ISA 8.x, sections on mbarrier, cp.async.bulk.tensor, wgmma, stmatrix and setmaxnreg.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace ptx {

// The 128 opaque bytes of a CUtensorMap; passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---------------------------------------------------------------- threads, warps, clusters

__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected != 0;
}

// Programmatic dependent launch (PDL). Returns when all preceding launches are complete and their writes visible. What
// they wrote must not be read through const __restrict__: the compiler may hoist such a load above this call.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next launch begin once every CTA of this one has called this; its own wait protects our results.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The two halves of cluster_sync, without its release, which would wait for writes to other GPUs.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// Loads from the same place in the shared memory of CTA `rank` of this cluster.
__device__ __forceinline__ int load_from_cta(const int* place, u32 rank) {
    int value;
    asm volatile("{ .reg .b32 from; mapa.shared::cluster.u32 from, %1, %2; ld.shared::cluster.s32 %0, [from]; }"
                 : "=r"(value)
                 : "r"(shared_address(place)), "r"(rank)
                 : "memory");
    return value;
}

// From shared memory, or past L1 from global memory.
__device__ __forceinline__ int load_relaxed(const int* place) {
    int value;
    asm volatile("ld.relaxed.gpu.s32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

// threadIdx.x, read anew: what follows from it takes no registers in a loop before.
__device__ __forceinline__ u32 thread_index() {
    u32 index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// Keeps an address in a register, for loops in which the compiler would compute it again each time.
template <typename T>
__device__ __forceinline__ T& keep_address(T& value) {
    T* address = &value;
    asm volatile("" : "+l"(address));
    return *address;
}

// Adds one, or begins at 0 again after `last`; the value before. atomicAdd would wait for it at once: ptxas combines
// the additions of a warp and shares the result.
__device__ __forceinline__ int increment(int* place, u32 last = 0xffffffff) {
    int before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(place), "r"(last) : "memory");
    return before;
}

// Of a u32, with a release of what came before and an acquire of what released additions before it.
__device__ __forceinline__ u32 increment_acquire_release(u32* place, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(place), "r"(last) : "memory");
    return before;
}

// The sum over this lane and all lower lanes.
__device__ __forceinline__ int warp_prefix_sum(int value) {
    const int lane = threadIdx.x % 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += below;
    }
    return value;
}

template <u32 kThreads>
__device__ __forceinline__ void named_barrier(u32 id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

template <u32 kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <u32 kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---------------------------------------------------------------- mbarrier

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_bytes(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Arrives at the same barrier of CTA `rank` of this cluster of kCluster (its own rank is allowed).
template <int kCluster>
__device__ __forceinline__ void mbarrier_arrive_at(u64* barrier, u32 rank) {
    if constexpr (kCluster == 1) {
        mbarrier_arrive(barrier);
    } else {
        asm volatile(
            "{ .reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)),
            "r"(rank)
            : "memory");
    }
}

// Arrives for a warp at the same barrier of every CTA of the cluster: kArrivals times, 1 or 32.
template <int kCluster, int kArrivals>
__device__ __forceinline__ void mbarrier_arrive_at_all(u64* barrier) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kArrivals == 1) {
        if (lane < kCluster) mbarrier_arrive_at<kCluster>(barrier, lane);
    } else {
        for (u32 rank = 0; rank < kCluster; ++rank) mbarrier_arrive_at<kCluster>(barrier, rank);
    }
}

// Writes 16 bytes to the same place in CTA `rank` of this cluster; they complete on that CTA's copy of the barrier.
__device__ __forceinline__ void store_to_cta(void* place, int4 value, u64* barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 to, done;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\n"
        "mapa.shared::cluster.u32 done, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6}, [done]; }" ::"r"(
            shared_address(place)),
        "r"(shared_address(barrier)), "r"(rank), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
        : "memory");
}

// The same with 8 bytes.
__device__ __forceinline__ void store_to_cta(void* place, float2 value, u64* barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 to, done;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\n"
        "mapa.shared::cluster.u32 done, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [to], {%3, %4}, [done]; }" ::"r"(
            shared_address(place)),
        "r"(shared_address(barrier)), "r"(rank), "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y))
        : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE: }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// ---------------------------------------------------------------- copies by threads

// Starts copying 16 bytes, both aligned to 16, from global to shared memory.
__device__ __forceinline__ void copy_async(void* destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(destination)), "l"(source)
                 : "memory");
}

// The same with 4 bytes.
__device__ __forceinline__ void copy_word_async(void* destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(destination)), "l"(source) : "memory");
}

// Copies `count` ints to shared memory, by all lanes of a warp, with several loads of each in flight.
__device__ __forceinline__ void copy_by_warp(int* destination, const int* source, int count) {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int base = threadIdx.x % 32; base < count; base += 32 * kAtOnce) {
        int found[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) found[i] = base + i * 32 < count ? __ldcg(source + base + i * 32) : 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
            if (base + i * 32 < count) destination[base + i * 32] = found[i];
    }
    __syncwarp();
}

// Waits for this thread's asynchronous copies.
__device__ __forceinline__ void wait_for_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---------------------------------------------------------------- TMA: bulk copies

// Starts copying bytes to shared memory; they complete on the barrier. All three are multiples of 16.
__device__ __forceinline__ void bulk_load(u64* full, void* destination, const void* source, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(destination)),
                 "l"(source), "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

// Starts copying bytes from shared memory, as part of this thread's next group of stores.
__device__ __forceinline__ void bulk_store(void* destination, const void* source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
                 "r"(shared_address(source)), "r"(bytes)
                 : "memory");
}

// Ends a group of this thread's stores; waits until all but the latest kLeft groups have read shared memory.
__device__ __forceinline__ void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_bulk_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// ---------------------------------------------------------------- TMA: bulk tensor copies

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the map's box at column x, row y into shared memory; rows and columns outside the tensor arrive as zeros.
__device__ __forceinline__ void tma_load(const TensorMap* map, u64* barrier, void* destination, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(destination)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
        : "memory");
}

// Loads the same box into the same place in every CTA of a cluster of kCluster; it completes on each CTA's own barrier.
template <int kCluster>
__device__ __forceinline__ void tma_load_to_cluster(const TensorMap* map, u64* barrier, void* destination, int x,
                                                    int y) {
    if constexpr (kCluster == 1) {
        tma_load(map, barrier, destination, x, y);
    } else {
        constexpr u16 kEveryCta = (1 << kCluster) - 1;
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(destination)),
            "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(kEveryCta)
            : "memory");
    }
}

// ---------------------------------------------------------------- wgmma ordering (the shapes are in wgmma.cuh)

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---------------------------------------------------------------- numbers

// Converts two fp32 to a pair of bf16, `low` in the lower half; rounds to nearest even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The same, to a pair of bf16 or of fp16.
template <bool kBf16>
__device__ __forceinline__ u32 pack(float low, float high) {
    if constexpr (kBf16) return pack_bf16(low, high);
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The 16-bit float in the lower half of a word: bf16, or fp16.
template <bool kBf16>
__device__ __forceinline__ float to_float(u32 word) {
    if constexpr (kBf16) return __uint_as_float(word << 16);
    float value;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(word));
    return value;
}

// Converts two fp32 to a pair of e4m3, `low` in the lower byte; rounds to nearest even.
__device__ __forceinline__ u16 pack_e4m3(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Bytes of `low` (0 to 3) and `high` (4 to 7), chosen by the lowest four half-bytes of a selector, each below 8.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
    u32 chosen;  // __byte_perm would clear the selector's other bits
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(low), "r"(high), "r"(selector));
    return chosen;
}

// For each byte of `word`, its highest bit in all of its bits.
__device__ __forceinline__ u32 sign_masks(u32 word) {
    u32 masks;
    asm("prmt.b32 %0, %1, %1, 0xba98;" : "=r"(masks) : "r"(word));
    return masks;
}

// Converts the lower two bytes of `pair` from e4m3 to fp16, the lower one to the lower half.
__device__ __forceinline__ u32 e4m3_to_fp16(u32 pair) {
    u32 halves;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(halves) : "r"(pair));
    return halves;
}

// Accurate to 2 ulp (exp2) and 1 ulp (reciprocal); subnormal results are 0.
__device__ __forceinline__ float approximate_exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float approximate_reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// a / b for a >= 0 and b > 0, in a tenth of the time of `/`; exact for a < 2^21.
__device__ __forceinline__ int approximate_quotient(int a, int b) {
    return static_cast<int>((static_cast<float>(a) + 0.5f) * approximate_reciprocal(static_cast<float>(b)));
}

// fmaxf and fminf drop a NaN; these propagate it.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// ---------------------------------------------------------------- shared memory

__device__ __forceinline__ void store_shared(u32 address, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of the 16-byte row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// ---------------------------------------------------------------- TMA: stores

// Makes this thread's ordinary writes to shared memory visible to the copy engine.
// Of global memory: bulk loads that follow see what this thread sees.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts copying the map's box from shared memory to column x, row y; nothing outside the tensor is written.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
                 "r"(y), "r"(source)
                 : "memory");
}

// Wait until all of this thread's copies, also those not committed yet, have read shared memory, or are complete.
__device__ __forceinline__ void commit_and_wait_bulk_stores_read() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void commit_and_wait_bulk_stores() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

// ---------------------------------------------------------------- memory that other GPUs and the host access, too

__device__ __forceinline__ u32 load_acquire_system(const u32* place) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_acquire_system(const u64* place) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_relaxed_system(const u32* place) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_relaxed_system(const u64* place) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_relaxed_system(const uint4* place) {
    uint4 four;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "l"(place)
                 : "memory");
    return four;
}

__device__ __forceinline__ void store_relaxed_system(u32* place, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_system(u64* place, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_system(uint4* place, uint4 four) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(four.x), "r"(four.y),
                 "r"(four.z), "r"(four.w)
                 : "memory");
}

__device__ __forceinline__ void store_release_system(u32* place, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release_system(u64* place, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ u64 global_nanoseconds() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

}  // namespace ptx
