"""A rank's end of the link to its proxy: it feeds the rank's rings, as the front end does on its own node."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from expertd.service.memory import Register, host_view
from expertd.service.moe.split import part_of
from expertd.service.ranks import setup as words
from expertd.service.ranks.front.staging import staging_bytes
from expertd.service.ranks.messages import StepCommand, StepEnd
from expertd.service.ranks.nodes.link import MessageKind, NodeLink, outputs_of
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.setup import MAX_SENT, SPIN_SECONDS, RankSetup, Rings

_REGIONS = range(1, 1 + MAX_SENT)  # one for each step that was sent


def region_of(number: int) -> int:
    """The region of step `number`."""
    return _REGIONS[number % len(_REGIONS)]


class RemoteControl(Protocol):
    """The part of `Control` that the front end of another node reaches."""

    replace_partitions: Callable[[dict[str, int] | None], None]
    record: Callable[[list[Any], Sequence[int]], None]

    def stop(self) -> None: ...


class RemoteSteps:
    """Connects to the proxy; steps may come after `share`. The process ends with the connection.

    rings    the front end's side of the rank's rings
    control  does what the front end asks for
    """

    def __init__(
        self, setup: RankSetup, regions: MappedRegions, rings: Rings, control: RemoteControl
    ) -> None:
        self._setup, self._regions, self._rings, self._control = setup, regions, rings, control
        self._steps: dict[int, StepCommand] = {}
        self._link = NodeLink(setup.rendezvous, setup.generation, setup.rank, 1)
        for work in (self._receive, self._send):
            threading.Thread(target=self._run, args=(work,), name="expertd-link", daemon=True).start()

    def share(self, register: Register) -> None:
        """Make memory for steps that the device can access. Raises OSError, RuntimeError."""
        settings = self._setup.settings
        max_rows = len(part_of(settings.limits.max_batch_tokens, 0, self._setup.num_ranks)) + 1
        size = max(staging_bytes(max_rows, model.hidden_size, model.top_k) for model in settings.models)
        for region in _REGIONS:
            descriptor = os.memfd_create("expertd-staging", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            self._regions.map(region, descriptor, size, 0, register)

    def tell(self, *message: Any) -> None:
        """Tell the front end."""
        try:
            self._link.tell(*message)
        except RuntimeError:
            os._exit(1)

    def send_trace(self, trace: bytes) -> None:
        """Send what was recorded, for the front end's file."""
        self._link.send(MessageKind.TRACE, b"", torch.frombuffer(bytearray(trace), dtype=torch.uint8))

    @staticmethod
    def _run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # the proxy is gone, and the group with it
            os._exit(1)

    def _receive(self) -> None:
        while True:
            head = self._link.receive()
            if head.kind is MessageKind.CONTROL:
                self._handle(head.words)
                continue
            if head.kind is MessageKind.STEP:
                command = StepCommand.unpacked(head.text)
                self._link.take(self._tensor(region_of(command.number), 0, head.num_bytes))
                self._steps[command.number] = command
            self._rings.commands.put(head.text)
            self._rings.command_bell.ring()

    def _handle(self, message: list[Any]) -> None:
        match message:
            case [words.STOP]:
                self._control.stop()
            case [words.PARTITIONS, sizes]:
                self._control.replace_partitions(sizes)
            case [words.RECORD, *what]:
                self._control.record(what, ())

    def _send(self) -> None:
        ends, bell = self._rings.ends, self._rings.end_bell
        while True:
            bell.wait(lambda: not ends.is_empty(), SPIN_SECONDS)
            if (end := ends.take()) is not None:
                step = StepEnd.unpacked(end)
                command = self._steps.pop(step.number)
                self._link.send(MessageKind.END, end, None if step.error else self._outputs(command))

    def _outputs(self, command: StepCommand) -> Tensor:
        """The memory of a step's outputs."""
        where = outputs_of(command, self._setup.settings.models[command.model].hidden_size)
        return self._tensor(region_of(command.number), where.start, len(where))

    def _tensor(self, region: int, offset: int, num_bytes: int) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(host_view(self._regions.span(region, offset, num_bytes)), dtype=torch.uint8)
