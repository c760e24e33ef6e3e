"""NIXL alone: two agents in two processes write as many bytes into each other's memory, in turns."""

import logging
import mmap
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_WRITTEN, _END = b"1", b"0"
_AWAKE_SECONDS = 0.2  # longer than a write


class Alone:
    """An agent whose peer is at the other end of a pipe. `device`: a GPU's number, or None: the host."""

    def __init__(self, pipe: Connection, num_bytes: int, device: int | None) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        kind, index = ("DRAM", 0) if device is None else ("VRAM", device)
        self._memory, address = _memory(num_bytes, device)
        # As in the product: without a thread of NIXL's, which would spin.
        self._agent = nixl_agent(
            secrets.token_hex(16), nixl_agent_config(enable_prog_thread=False, backends=[])
        )
        try:
            self._agent.create_backend("UCX")
        except Exception:  # transports that do not find out that a peer has gone
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        self._agent.register_memory([(address, num_bytes, index, "")], kind)
        pipe.send((self._agent.get_agent_metadata(), address, index))
        metadata, there, there_index = pipe.recv()
        self._peer = self._agent.add_remote_agent(metadata).decode()
        descriptions = (
            self._agent.get_xfer_descs([place], kind)
            for place in ((address, num_bytes, index), (there, num_bytes, there_index))
        )
        self._transfer = self._agent.initialize_xfer("WRITE", *descriptions, self._peer, _WRITTEN)

    def write(self) -> None:
        """Write all bytes to the peer, and tell it."""
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            os.sched_yield()
            state = self._agent.check_xfer_state(self._transfer)
        if state != "DONE":
            raise RuntimeError(f"nixl: expected a write to be made, got {state}")

    def receive(self) -> bytes:
        """What the peer says next."""
        end = time.perf_counter() + _AWAKE_SECONDS
        while not (found := self._agent.get_new_notifs()):
            if time.perf_counter() < end:
                os.sched_yield()
            else:  # another way is measured, which needs the core
                time.sleep(0.001)
        ((message,),) = found.values()
        return bytes(message)

    def end(self) -> None:
        """Have the peer end."""
        self._agent.send_notif(self._peer, _END)


@contextmanager
def alone(num_bytes: int, devices: tuple[int, int] | None = None) -> Iterator[Callable[[], None]]:
    """A call writes as many bytes there and back. `devices`: this side's GPU, and the other's."""
    here, there = devices or (None, None)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_answer, args=(other, num_bytes, there), daemon=True)
    process.start()
    _be_quiet()
    agent = Alone(pipe, num_bytes, here)

    def call() -> None:
        agent.write()
        agent.receive()

    try:
        yield call
    finally:
        agent.end()
        process.join()


def _answer(pipe: Connection, num_bytes: int, device: int | None) -> None:
    _be_quiet()
    agent = Alone(pipe, num_bytes, device)
    while agent.receive() != _END:
        agent.write()


def _memory(num_bytes: int, device: int | None) -> tuple[object, int]:
    """Memory that is there, and its address; that of the host is shared, as a channel's is."""
    if device is None:
        host: Any = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        host.fill(1)
        return host, host.ctypes.data
    import torch

    memory = torch.ones(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    return memory, memory.data_ptr()


def _be_quiet() -> None:
    """NIXL logs to the standard output, and each transport of UCX that is of no use."""
    logging.disable(logging.INFO)
    os.environ |= {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
