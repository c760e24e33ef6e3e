"""Times of calls that ranks make together: the group's processes, and a clock that no host delays."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.layer.moe_layer import FLUSH_BYTES

REPEATS, WARM_UP = 20, 3
IN_A_ROW = 9  # calls of a graph, the first of which is not counted
SLEEP_CYCLES = 1_000_000  # of the GPU, about 0.5 ms: meanwhile all hosts enqueue what is timed
METHOD = (
    "median of 20 calls of the slowest rank's time, by CUDA events; each after a 1 GB fill, 0.5 ms of sleep "
    "on the device, in which the host enqueues the call, and a barrier of all ranks on the device"
)
IN_A_ROW_METHOD = (
    f"exchange_next_us and nccl_next_us: the time of a graph of {IN_A_ROW} calls minus that of one call, "
    f"divided by {IN_A_ROW - 1}; the sums of a call are the tokens of the next one, and L2 is not cold"
)
_LIMIT = timedelta(seconds=300)  # for ranks that compile, or have nothing to measure


@dataclass(frozen=True)
class Ranks:
    """Ranks that measure together: the first ones of the program.

    group           for the host: gloo
    device_barrier  of these ranks, on the current stream
    """

    group: dist.ProcessGroup
    device_barrier: Callable[[], object]

    @property
    def count(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def host_barrier(self) -> None:
        """Wait on the host until all are here."""
        dist.barrier(self.group)


def join(rank: int, num_ranks: int, device: int, port: int | None) -> None:
    """Make the default group: gloo on the host, NCCL on GPUs. port: of the store; None: as torchrun says."""
    if port is not None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=num_ranks, timeout=_LIMIT)


def first_ranks(count: int) -> Ranks | None:
    """The first `count` ranks; None on the others. Every rank of the program calls it, larger counts first.

    In that order, because torch's symmetric memory counts meetings: ranks that meet in a small group must
    have met as often before.
    """
    group = dist.new_group(list(range(count)), backend="gloo", timeout=_LIMIT)
    if dist.get_rank() >= count:
        return None
    assert isinstance(group, dist.ProcessGroup)
    return Ranks(group, device_barrier(group) if count > 1 else lambda: None)


def device_barrier(group: dist.ProcessGroup) -> Callable[[], object]:
    """A barrier of a group's ranks on the current stream."""
    import torch.distributed._symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    signals = symmetric_memory.empty(1, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(signals, group)

    def barrier(_: object = signals) -> None:  # keeps the memory
        handle.barrier(channel=0)

    return barrier


def group_sizes(num_ranks: int) -> list[int]:
    """Numbers of GPUs to compare, the largest first: all of them, then each power of two below."""
    return [num_ranks, *(size for size in (4, 2, 1) if size < num_ranks)]


def gathered(numbers: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """The numbers of every rank, as many each; collective."""
    own = torch.tensor(numbers, dtype=torch.int64)
    every = [torch.empty_like(own) for _ in range(ranks.count)]
    dist.all_gather(every, own, group=ranks.group)
    return [each.tolist() for each in every]


def graph_or_call(call: Callable[[], object], ranks: Ranks) -> tuple[Callable[[], object], bool]:
    """A replay of the call as a CUDA graph, and True; the call, and False unless all ranks capture it.

    For calls of NCCL, whose capture may fail. Collective.
    """
    call()
    torch.cuda.synchronize()
    ranks.host_barrier()
    graph, captured = torch.cuda.CUDAGraph(), True
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        print(f"rank {ranks.rank}: not captured: {error}", flush=True)
        captured = False
    if not all(own for (own,) in gathered([int(captured)], ranks)):
        return call, False

    def replay(_: object = call) -> None:  # keeps the tensors that the graph reads
        graph.replay()

    return replay, True


def of_next(in_a_row: float, alone: float) -> float:
    """The time of each call after the first, by those of IN_A_ROW calls in a graph and of one."""
    return (in_a_row - alone) / (IN_A_ROW - 1)


def microseconds(call: Callable[[], object], ranks: Ranks) -> float:
    """The median of the slowest rank's times; collective."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times = torch.empty(REPEATS)
    for repeat in range(-WARM_UP, REPEATS):
        flush.fill_(1)
        ranks.host_barrier()
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        ranks.device_barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times[max(0, repeat)] = 1e3 * start.elapsed_time(end)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=ranks.group)
    return float(times.median())
