"""The runners of the layers whose steps take turns: all of a server's, or those of one lane."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from expertd.service.moe.base import Layer
from expertd.service.moe.batch import FLOATS
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.stages import StageTimer
from expertd.service.moe.staging import Staging
from expertd.service.moe.step_counts import HostCopies, Launches
from expertd.service.settings.lanes import Lane, LaneSettings
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings

if TYPE_CHECKING:
    from expertd.kernels.partitions import SMPartitions

_FIRST = -1  # priority of a stream: its kernels start before those of other streams


class RunnerSet:
    """Runners that share memory for their steps and, on a lane, a stream; `runners` has them by model.

    timer        of steps with traced requests; None: there are none
    launches     of all their steps, by model, also of runners that are gone
    host_copies  likewise, of all models
    """

    def __init__(
        self,
        lane: Lane,
        device: torch.device,
        partitions: "SMPartitions | None",
        timer: StageTimer | None = None,
    ) -> None:
        self.runners: dict[str, LayerRunner] = {}
        self._lane, self._device, self._partitions, self._timer = lane, device, partitions, timer
        self.staging: Staging | None = None
        self.launches: dict[str, Launches] = {}
        self.host_copies = HostCopies()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.staging = Staging(device)
            self.host_copies = self.staging.host_copies
            if lane.name:  # else the lanes' steps would be in one stream, without partitions
                self._stream = torch.cuda.Stream(device, priority=0 if lane.is_prefill else _FIRST)  # type: ignore[no-untyped-call]

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
            with_graphs=self._lane.with_graphs,
            timer=self._timer,
            launches=self.launches.setdefault(model.name, Launches()),
            copies=self.host_copies,
        )
        self.runners[model.name] = runner
        return runner

    def streams(self) -> Iterator[tuple[str, torch.cuda.Stream]]:
        """The streams of steps and of their copies, each with a name; none on a CPU."""
        if self.staging is None:
            return
        lane = f"{self._lane.name} lane, " if self._lane.name else ""
        for runner in self.runners.values():
            with runner.on_stream():
                stream = torch.cuda.current_stream(self._device)
            name = runner.partition
            where = "the whole GPU"
            if name is not None and self._partitions is not None:
                where = f"partition {name} ({self._partitions.num_sms(name)} SMs)"
            yield f"{lane}{where}", stream
        yield f"{lane}copies in", self.staging.copy_in
        yield f"{lane}copies out", self.staging.copy_out

    def move(self, partition: str | None) -> None:
        """Run further steps in this partition; None: on the whole device. Capture graphs again then."""
        for runner in self.runners.values():
            runner.partition = partition


def first_sizes(settings: Settings, partitions: "SMPartitions") -> Mapping[str, int]:
    """SMs of each partition at first: as in the settings, but for prefill where the server chooses the split.

    It has all SMs that decode does not have, as later. Raises ValueError if the settings do not fit.
    """
    lanes = settings.lanes
    if lanes.decode_p99_ms is None:
        return settings.partitions
    from expertd.kernels.partitions import plan  # which a server without partitions does not need

    shares = plan(settings.partitions, partitions.supply)
    decode = next(share.partition for share in shares if share.partition.name == lanes.decode_partition)
    return split_sizes(lanes, partitions, decode.num_sms)


def split_sizes(lanes: LaneSettings, partitions: "SMPartitions", decode_sms: int) -> dict[str, int]:
    """SMs of the lanes' partitions: `decode_sms` for decode, the rest for prefill, which is alone if 0."""
    decode_name, prefill_name = lanes.decode_partition, lanes.prefill_partition
    assert decode_name is not None
    assert prefill_name is not None
    if not decode_sms:
        return {decode_name: partitions.granularity}  # for what the decode lane has left
    supply = partitions.supply
    whole = supply.units * supply.unit_sms + supply.spare_sms  # not all SMs may fit partitions
    return {decode_name: decode_sms, prefill_name: whole - decode_sms}


def set_split(lanes: LaneSettings, prefill: RunnerSet, partitions: "SMPartitions", decode_sms: int) -> None:
    """Give the decode lane `decode_sms` SMs and the prefill lane the rest; 0: all to the prefill lane.

    Raises ValueError, and changes nothing, if the device cannot be split so. For a time when no step runs.
    """
    partitions.apply(split_sizes(lanes, partitions, decode_sms))
    prefill.move(lanes.prefill_partition if decode_sms else None)
