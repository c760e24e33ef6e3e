"""Named partitions of a GPU's SMs: green contexts through cuda.core, each with a stream for torch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

logger = logging.getLogger(__name__)

_Groups = tuple[int, int, bool]  # the first group of SMs, how many, and whether with the spare SMs

MAX_CONTEXTS = 64
"""Different sets of SMs that a GPU's partitions may have had: the driver (580) never frees 4 MB of each."""


@dataclass(frozen=True)
class Partition:
    """One named share of the SMs: the number requested, and the number it has."""

    name: str
    requested_sms: int
    num_sms: int


@dataclass(frozen=True)
class Supply:
    """The SMs the driver offers: `units` groups of `unit_sms`, and `spare_sms` that one partition may add.

    132 SMs can be 16 groups of 8 with 4 to spare: groups lie within a GPC, and not every GPC divides evenly.
    """

    total_sms: int
    unit_sms: int
    units: int
    spare_sms: int


@dataclass(frozen=True)
class PlannedPartition:
    """A planned partition: how many groups it takes, and whether it also takes the spare SMs."""

    partition: Partition
    units: int
    spare: bool


def plan(sizes: Mapping[str, int], supply: Supply) -> tuple[PlannedPartition, ...]:
    """Round every size up to whole groups, and give the spare SMs to the partition where they save the most.

    Every partition has at least one group. Raises ValueError with the numbers when they do not fit.
    """
    for name, size in sizes.items():
        if not name:
            raise ValueError(f"partitions: expected a name for {size} SMs, got ''")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"partitions.{name}: expected a number of SMs of at least 1, got {size!r}")
    plans = [_rounded(sizes, supply, spare_name) for spare_name in (None, *sizes)]
    fitting = [shares for shares in plans if _units(shares) <= supply.units]
    if not fitting:
        raise ValueError(_misfit(sizes, supply, min(_units(shares) for shares in plans)))
    return min(fitting, key=lambda shares: sum(share.partition.num_sms for share in shares))


def _groups(shares: tuple[PlannedPartition, ...]) -> list[_Groups]:
    """Where each share's groups are."""
    firsts = accumulate((share.units for share in shares), initial=0)
    return [(first, share.units, share.spare) for first, share in zip(firsts, shares, strict=False)]


def _rounded(
    sizes: Mapping[str, int], supply: Supply, spare_name: str | None
) -> tuple[PlannedPartition, ...]:
    shares = []
    for name, size in sizes.items():
        spare = supply.spare_sms if name == spare_name else 0
        min_units = 0 if spare >= supply.unit_sms else 1
        units = max(min_units, -(-(size - spare) // supply.unit_sms))
        granted = units * supply.unit_sms + spare
        shares.append(PlannedPartition(Partition(name, size, granted), units, spare > 0))
    return tuple(shares)


def _units(shares: tuple[PlannedPartition, ...]) -> int:
    return sum(share.units for share in shares)


def _misfit(sizes: Mapping[str, int], supply: Supply, needed: int) -> str:
    asked = ", ".join(f"{name} {size}" for name, size in sizes.items())
    spare = f", and {supply.spare_sms} more for one partition" if supply.spare_sms else ""
    return (
        f"partitions: expected to fit {supply.total_sms} SMs, given out in {supply.units} groups of "
        f"{supply.unit_sms} (a partition has 1 at least){spare}; got {asked}: {sum(sizes.values())} SMs, "
        f"{needed} groups"
    )


class SMPartitions:
    """The partitions of one GPU: none at first, replaced as a whole by `apply`.

    Call `apply` from one thread, between steps; everything else can be read from any thread.
    """

    def __init__(self, device: int = 0) -> None:
        self._index = device
        with torch.cuda.device(device):
            whole = _current_device(device).resources.sm
            units, spare = _split(whole)
        # One split for all: groups of the same split may share a context, and do not overlap.
        self._units, self._spare = units, spare
        self._streams: dict[_Groups, torch.cuda.Stream] = {}
        self.supply = Supply(
            total_sms=whole.sm_count,
            unit_sms=units[0].sm_count,
            units=len(units),
            spare_sms=spare.sm_count if _can_join(units[0], spare) else 0,
        )
        self._lanes: dict[str, tuple[Partition, torch.cuda.Stream]] = {}

    @property
    def device_name(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self._index)

    @property
    def total_sms(self) -> int:
        """SMs of the whole GPU."""
        return self.supply.total_sms

    @property
    def granularity(self) -> int:
        """SMs per group. Partitions are made of groups, so this is also the smallest partition."""
        return self.supply.unit_sms

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The current partitions, in the order of the request."""
        return tuple(partition for partition, _ in self._lanes.values())

    def apply(self, sizes: Mapping[str, int]) -> tuple[Partition, ...]:
        """Replace all partitions by `sizes` (name -> SMs), or change nothing and raise.

        Waits for the work in the old partitions' streams. Partitions of the same SMs have the same stream
        each time. Raises ValueError with the numbers when the sizes do not fit, or need more
        than MAX_CONTEXTS different sets of SMs, counted from the start.
        """
        shares = plan(sizes, self.supply)
        self._check_contexts(shares)
        with torch.cuda.device(self._index):
            lanes = {
                share.partition.name: (share.partition, self._stream_on(key, share.partition))
                for share, key in zip(shares, _groups(shares), strict=True)
            }
            for _, stream in self._lanes.values():
                stream.synchronize()
            torch.cuda.empty_cache()  # else memory cached for the old streams is never reused
            self._lanes = lanes
        return self.partitions

    def stream(self, name: str | None) -> torch.cuda.Stream:
        """The stream of a partition; for None, torch's current stream on the whole device."""
        return torch.cuda.current_stream(self._index) if name is None else self._lane(name)[1]

    def num_sms(self, name: str | None) -> int:
        """SMs of a partition; for None, of the whole device."""
        return self.total_sms if name is None else self._lane(name)[0].num_sms

    def _check_contexts(self, shares: tuple[PlannedPartition, ...]) -> None:
        """Raise ValueError if these shares would need too many contexts."""
        if len(self._streams.keys() | _groups(shares)) > MAX_CONTEXTS:
            raise ValueError(
                f"partitions: expected at most {MAX_CONTEXTS} different sets of SMs since the start, whose "
                f"memory the driver keeps; got another: use sizes from before, or start again"
            )

    def _stream_on(self, key: _Groups, partition: Partition) -> torch.cuda.Stream:
        """The stream on these groups of SMs."""
        if key not in self._streams:
            first, units, spare = key
            resources = self._units[first : first + units] + ([self._spare] if spare else [])
            self._streams[key] = _open(_current_device(self._index), partition, resources)
        return self._streams[key]

    def _lane(self, name: str) -> tuple[Partition, torch.cuda.Stream]:
        lane = self._lanes.get(name)
        if lane is None:
            raise ValueError(
                f"partition: expected one of {', '.join(self._lanes) or 'none at all'}, got {name!r}"
            )
        return lane


def partitions_of(device: int) -> SMPartitions | None:
    """Those of a GPU; None, with a warning, where the driver makes no green contexts."""
    from cuda.core._utils.cuda_utils import CUDAError

    try:
        return SMPartitions(device)
    except CUDAError as error:
        logger.warning("partitions: expected green contexts on cuda:%d, got none: %s", device, error)
        return None


class _PartitionStream(torch.cuda.ExternalStream):
    """A green context's stream, for torch. It keeps the stream and the context alive."""

    owners: tuple[Any, Any]


def _current_device(index: int) -> Any:
    """cuda.core's device, with torch's context current in this thread."""
    from cuda.core import Device

    torch.cuda.synchronize(index)  # creates torch's context if there is none yet
    device = Device(index)
    device.set_current()
    return device


def _open(device: Any, partition: Partition, resources: list[Any]) -> torch.cuda.Stream:
    """A stream in a new green context that has exactly `resources`."""
    from cuda.core import ContextOptions

    context = device.create_context(ContextOptions(resources=resources))
    granted = context.resources.sm.sm_count
    if granted != partition.num_sms:
        raise RuntimeError(
            f"partitions.{partition.name}: expected a context of {partition.num_sms} SMs, got {granted}"
        )
    inner = context.create_stream()
    stream = _PartitionStream(int(inner.handle), device.device_id)  # type: ignore[no-untyped-call]
    stream.owners = (context, inner)  # a tuple releases its last item first: the stream before its context
    return stream


def _split(whole: Any) -> tuple[list[Any], Any]:
    """The GPU's SMs as groups of the smallest size, as many as the driver can make, and the remainder."""
    from cuda.core import SMResourceOptions
    from cuda.core._utils.cuda_utils import CUDAError  # cuda.core exports it nowhere else

    size = whole.min_partition_size
    for count in range(whole.sm_count // size, 0, -1):
        try:
            units, rest = whole.split(SMResourceOptions(count=[size] * count))
            return list(units), rest
        except CUDAError:
            # Drivers before 13.1 make as many groups as they can; later ones refuse a count that is too high.
            if count == 1:
                raise
    raise RuntimeError(f"expected at least {size} SMs to make a partition of, got {whole.sm_count}")


def _can_join(unit: Any, spare: Any) -> bool:
    """Whether one context may hold both; the driver rejects resources with different guarantees."""
    from cuda.bindings import driver

    if not spare.sm_count:
        return False
    both = [driver.CUdevResource(_ptr=resource.handle) for resource in (unit, spare)]
    status, _ = driver.cuDevResourceGenerateDesc(both, len(both))
    return bool(status == driver.CUresult.CUDA_SUCCESS)
