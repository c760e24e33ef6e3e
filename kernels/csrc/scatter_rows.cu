// Writes a step's output rows to where each request wants them, in its datatype: to pinned host memory, or to the
// memory of any GPU that this one can write. One CTA per token. With CALLS, it is the last launch of a step of device
// calls, whose outputs are bf16, and answers them.
#include "device_calls.cuh"
#include "floats.cuh"

constexpr int kThreads = 256;

template <floats::Datatype kDatatype>
__device__ __forceinline__ void write(void* to, const float* from, int h) {
    for (int column = threadIdx.x * 8; column < h; column += kThreads * 8) {
        float values[8];
        floats::load<floats::FP32>(values, from, column);
        floats::store<kDatatype>(to, column, values);
    }
}

__device__ __forceinline__ void write_to(const Request& request, i64 token, int h, const float* rows) {
    const i64 row = (token - static_cast<int>(request.first_token)) * h;
    rows += token * h;
#if CALLS
    return write<floats::BF16>(reinterpret_cast<u16*>(request.out) + row, rows, h);
#endif
    switch (request.out_datatype) {
        case floats::BF16: return write<floats::BF16>(reinterpret_cast<u16*>(request.out) + row, rows, h);
        case floats::FP16: return write<floats::FP16>(reinterpret_cast<u16*>(request.out) + row, rows, h);
        default: return write<floats::FP32>(reinterpret_cast<float*>(request.out) + row, rows, h);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) scatter_rows(const RequestTable* table, int h,
#if CALLS
                                                                    CallStep* step,
#endif
                                                                    const float* rows  // [num_tokens, h]
) {
    __shared__ Request found;
    const i64 token = blockIdx.x;
#if CALLS
    const CallAnswers answers(step);
    const bool is_padding = !table->find_here<kThreads>(found, static_cast<int>(token));
#else
    const bool is_padding = !table->find(found, static_cast<int>(token));
#endif
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    if (!is_padding) write_to(found, token, h, rows);
#if CALLS
    answers.write();
#endif
}
