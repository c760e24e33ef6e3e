"""The runners of the layers whose steps take turns: all of a server's, or those of one lane."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertd.service.device import Device, Stream
from expertd.service.moe.base import Layer
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.step.batch import FLOATS
from expertd.service.moe.step.stages import StageTimer
from expertd.service.moe.step.staging import Staging
from expertd.service.moe.step.step_counts import HostCopies, Launches
from expertd.service.settings.lanes import Lane
from expertd.service.settings.served import ModelSettings

if TYPE_CHECKING:
    from expertd.kernels.partitions import SMPartitions

_FIRST = -1  # priority of a stream: its kernels start before those of other streams


class LaneRunners:
    """Runners that share memory for their steps and, on a lane, a stream; `runners` has them by model.

    timer        of steps with traced requests; None: there are none
    launches     of all their steps, by model, also of runners that are gone
    host_copies  likewise, of all models
    """

    def __init__(
        self,
        lane: Lane,
        device: Device,
        partitions: "SMPartitions | None",
        timer: StageTimer | None = None,
    ) -> None:
        self.runners: dict[str, LayerRunner] = {}
        self._lane, self._device, self._partitions, self._timer = lane, device, partitions, timer
        self.staging: Staging | None = None
        self.launches: dict[str, Launches] = {}
        self.host_copies = HostCopies()
        self._stream: Stream | None = None
        if not device.is_host:
            self.staging = Staging(device)
            self.host_copies = self.staging.host_copies
            if lane.name and lane.partition is None:  # else the lanes' steps would be in one stream
                self._stream = device.new_stream(0 if lane.is_prefill else _FIRST)

    def add(self, model: ModelSettings, layer: Layer) -> LayerRunner:
        """Make a runner of `layer`."""
        if self.staging is not None:
            itemsize, tokens = FLOATS[model.datatype].itemsize, self._lane.limits.max_batch_tokens
            self.staging.prepare(tokens, model.hidden_size, model.top_k, itemsize)
        runner = LayerRunner(
            layer,
            self._device,
            self._partitions,
            self._lane.partition or model.partition,
            self.staging,
            self._stream,
            with_graphs=not self._lane.is_prefill,
            timer=self._timer,
            launches=self.launches.setdefault(model.name, Launches()),
            copies=self.host_copies,
        )
        self.runners[model.name] = runner
        return runner

    def streams(self) -> Iterator[tuple[str, Stream]]:
        """The streams of steps and of their copies, each with a name; none on a CPU."""
        if self.staging is None:
            return
        lane = f"{self._lane.name} lane, " if self._lane.name else ""
        for runner in self.runners.values():
            with runner.on_stream():
                stream = self._device.current_stream()
            name = runner.partition
            where = "the whole GPU"
            if name is not None and self._partitions is not None:
                where = f"partition {name} ({self._partitions.num_sms(name)} SMs)"
            yield f"{lane}{where}", stream
        yield f"{lane}copies in", self.staging.copy_in
        yield f"{lane}copies out", self.staging.copy_out
