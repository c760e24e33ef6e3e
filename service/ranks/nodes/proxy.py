"""The front end's proxy of a rank on another node: what the front end sees of it, rings and shared memory.

It sends the rank its rows of each step, and writes the rows that come back where they belong.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

import numpy as np
import torch

from expertd.service.moe.request import LayerRequest
from expertd.service.ranks import setup as words
from expertd.service.ranks.messages import NO_STEP, StepCommand, StepEnd
from expertd.service.ranks.nodes.board import Board
from expertd.service.ranks.nodes.link import MessageKind, NodeLink, PackedStep, pack, unpack
from expertd.service.ranks.nodes.remote import region_of
from expertd.service.ranks.recording import said
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.setup import SPIN_SECONDS, RankSetup, Rings
from expertd.service.ranks.worker.own_steps import requests_of

_END_SECONDS = 1.5  # for the rank to end after its last step
_REPORT_SECONDS = 0.3


class Proxy:
    """Connects to the rank. `say` tells the front end."""

    def __init__(
        self, setup: RankSetup, regions: MappedRegions, rings: Rings, say: Callable[..., None]
    ) -> None:
        self._setup, self._regions, self._rings, self._say = setup, regions, rings, say
        self._steps: dict[int, tuple[PackedStep, list[LayerRequest]]] = {}  # on the rank
        self._ending = threading.Lock()  # both threads put ends in the ring
        self._is_stopped: Callable[[], bool] = lambda: False
        self._trace_file: IO[bytes] | None = None  # the front end's
        self._trace_error = ""  # why it could not be written
        self._link = NodeLink(setup.rendezvous, setup.generation, setup.rank, 0)
        self._receiver = threading.Thread(target=self._receive, name="expertd-link", daemon=True)
        self._receiver.start()

    def serve(self, stopped: Callable[[], bool]) -> int:
        """Pass on steps until `stopped` and the bell of commands say so; the exit code."""
        commands, bell = self._rings.commands, self._rings.command_bell
        self._is_stopped = stopped
        while True:
            bell.wait(lambda: stopped() or not commands.is_empty(), SPIN_SECONDS)
            if stopped():
                break
            if (data := commands.take()) is not None:
                self._pass_on(data)
        with suppress(RuntimeError):  # it may have ended with others of its node
            self._link.tell(words.STOP)
        self._receiver.join(_END_SECONDS)
        return 0

    def replace_partitions(self, sizes: dict[str, int] | None) -> None:
        """Pass the sizes on; the answer comes as other words do."""
        self._link.tell(words.PARTITIONS, sizes)

    def record(self, message: list[Any], files: Sequence[int]) -> None:
        """Pass on what is asked about a recording, and keep the file for the trace."""
        for descriptor in files:
            self._trace_file = os.fdopen(descriptor, "wb")
        self._link.tell(words.RECORD, *message)

    def _pass_on(self, data: bytes) -> None:
        try:
            if data.startswith(NO_STEP):
                self._link.send(MessageKind.MOVE, data)
            else:
                self._send(StepCommand.unpacked(data))
        except RuntimeError:
            self._receiver.join()  # it says why, and ends the process

    def _send(self, command: StepCommand) -> None:
        setup, model = self._setup, self._setup.settings.models[command.model]
        sizes = model.hidden_size, model.top_k
        try:
            requests = requests_of(command.requests, setup.rank, setup.num_ranks, *sizes, self._regions.span)
            step = pack(command.number, command.model, requests, model.hidden_size, region_of(command.number))
        except Exception as error:
            self._end(StepEnd.failed(command.number, f"{type(error).__name__}: {error}").packed())
            return
        self._steps[command.number] = step, requests
        self._link.send(MessageKind.STEP, step.command.packed(), torch.from_numpy(step.inputs))

    def _receive(self) -> None:
        try:
            while True:
                head = self._link.receive()
                if head.kind is MessageKind.CONTROL:
                    self._hear(head.words)
                elif head.kind is MessageKind.TRACE:
                    self._write_trace(head.num_bytes)
                else:
                    self._finish(head.text, head.num_bytes)
        except RuntimeError:
            if not self._is_stopped():
                self._say(words.LOST, self._why_lost())
                os._exit(1)

    def _hear(self, message: list[Any]) -> None:
        """Pass on what the rank says; it speaks of a recording only after sending the trace, if any."""
        if message[0] == words.RECORDED:
            error, self._trace_error = self._trace_error, ""
            if self._trace_file is not None:
                self._trace_file.close()
                self._trace_file = None
            if error:
                message = [words.RECORDED, error]
        self._say(*message)

    def _write_trace(self, num_bytes: int) -> None:
        trace = np.empty(num_bytes, np.uint8)
        self._link.take(torch.from_numpy(trace))
        file, self._trace_file = self._trace_file, None
        assert file is not None
        try:
            with file:
                file.write(trace.data)
        except OSError as error:
            self._trace_error = said(error)

    def _finish(self, end: bytes, num_bytes: int) -> None:
        outputs = np.empty(num_bytes, np.uint8)
        self._link.take(torch.from_numpy(outputs))
        step, requests = self._steps.pop(StepEnd.unpacked(end).number)
        if num_bytes:
            unpack(outputs, step, requests)
        self._end(end)

    def _end(self, end: bytes) -> None:
        with self._ending:
            self._rings.ends.put(end)
        self._rings.end_bell.ring()

    def _why_lost(self) -> str:
        """What the agent of its node says, which may have just noticed."""
        setup = self._setup
        said = Board(setup.rendezvous).await_report(setup.generation, setup.node, _REPORT_SECONDS)
        return said or f"rank {setup.rank}: its connection to node {setup.node} ended"
