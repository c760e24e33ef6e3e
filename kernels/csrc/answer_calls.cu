// The last kernel of an armed step: tells callers that their outputs are there, and counts. One CTA.
#include "device_calls.cuh"

extern "C" __global__ void __launch_bounds__(kMaxCalls) answer_calls(const CallStep* step,
                                                                     u64* counts,  // [num_layers, kCounts]
                                                                     u64* on_host  // the same, for the host to read
) {
    const u32 thread = threadIdx.x;
    if (thread < step->num_calls) {
        ptx::fence_system();  // after the outputs, which earlier launches have written to the callers' memory
        ptx::store_release_system(reinterpret_cast<u64*>(step->answers[thread].place), step->answers[thread].sequence);
    }
    if (thread >= kCounts || step->num_calls == 0) return;
    const u64 nanoseconds = ptx::global_nanoseconds() - step->began;
    const u32 place = step->layer * kCounts + thread;
    counts[place] += thread == 0 ? 1 : thread == 1 ? step->num_calls : thread == 2 ? step->num_tokens : nanoseconds;
    on_host[place] = counts[place];
}
