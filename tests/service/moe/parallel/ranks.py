"""Rank processes for tests: they join one group over loopback, and run functions on request."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from expertd.service.moe.parallel import TorchExchange, join_group

_START_SECONDS = 240  # to import torch and others, and to join, on a busy machine
_LOOPBACK = "127.0.0.1"


def new_store() -> TCPStore:
    """A store that this process serves, on a free port."""
    return TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)


class Ranks:
    """Processes of one group of `num_ranks`; each group of several is given by its ranks.

    timeout_seconds  of the groups; no call waits for much longer
    """

    def __init__(self, num_ranks: int, groups: Sequence[Sequence[int]], timeout_seconds: float) -> None:
        self._store = new_store()
        self._timeout = timeout_seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # with torch, which takes seconds
        self._connections: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = rank, num_ranks, self._store.port, timeout_seconds, groups, theirs
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._connections.append(ours)
        for rank in range(num_ranks):
            self._receive(rank, _START_SECONDS)

    def run(
        self, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any, late: int | None = None
    ) -> list[Any]:
        """The results, or exceptions, of function(exchange, *arguments) on each of the ranks of a group.

        late  a rank that begins only after the others
        """
        for rank in ranks:
            if rank != late:
                self.begin(rank, ranks, function, *arguments)
        if late is not None:
            self.begin(late, ranks, function, *arguments)
        return self.finish(ranks)

    def begin(self, rank: int, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any) -> None:
        """Let one rank begin."""
        self._connections[rank].send_bytes(pickle.dumps((tuple(ranks), function, arguments)))
        assert self._receive(rank, _START_SECONDS) == "begun"  # it imports what it needs

    def finish(self, ranks: Sequence[int]) -> list[Any]:
        """What each rank has returned or raised."""
        return [self._receive(rank, 60 + 4 * self._timeout) for rank in ranks]

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.join()
            process.close()
            connection.close()

    def _receive(self, rank: int, seconds: float) -> Any:
        if not self._connections[rank].poll(seconds):
            raise TimeoutError(f"rank {rank}: expected an answer within {seconds:g} s")
        return pickle.loads(self._connections[rank].recv_bytes())


@contextmanager
def ranks_of(num_ranks: int, groups: Sequence[Sequence[int]], timeout_seconds: float) -> Iterator[Ranks]:
    """Ranks that end with the context."""
    ranks = Ranks(num_ranks, groups, timeout_seconds)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(
    rank: int, num_ranks: int, port: int, timeout: float, groups: Sequence[Sequence[int]], parent: Connection
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # ranks share the machine, and one thread adds in one order
    store = TCPStore(_LOOPBACK, port, is_master=False)
    join_group(store, rank, num_ranks, timeout_seconds=_START_SECONDS, backend="gloo")
    exchanges = {}
    for group in groups:
        made = dist.new_group(list(group), timeout=timedelta(seconds=timeout), backend="gloo")
        if rank in group:
            exchanges[tuple(group)] = TorchExchange(made)
    parent.send_bytes(pickle.dumps(time.monotonic()))
    while True:
        try:
            group, function, arguments = pickle.loads(parent.recv_bytes())
        except EOFError:
            return
        parent.send_bytes(pickle.dumps("begun"))
        try:
            result = function(exchanges[group], *arguments)
        except Exception as error:
            traceback.print_exc()
            result = error
        parent.send_bytes(pickle.dumps(result))
