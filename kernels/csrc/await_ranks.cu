// Ends when every rank's tokens have arrived, or at the time limit.
#include "ranks.cuh"

extern "C" __global__ void __launch_bounds__(32) await_ranks(Ranks* ranks) {
    ptx::grid_dependency_wait();
    ranks->wait(DISPATCH);
    ptx::launch_dependents();
}
