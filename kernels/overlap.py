"""Communication of an expert-parallel layer while its GEMMs run, on SMs of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from expertd.kernels.partitions import SMPartitions, Supply

OverlapMode = Literal["auto", "always", "never"]

PART_COLUMNS = 2048
"""Columns of out that are computed, then combined, as one part; the last part has the rest."""

# Measured on two and four H200s, see docs/internals/benchmarks-parallel.md.
_RANKS, _TOKENS = 4, 4096  # lower bounds


def overlaps(mode: OverlapMode, counts: Sequence[int], hidden_size: int) -> bool:
    """Whether a call with counts[r] tokens on rank r combines parts of its output while it runs GEMMs.

    With "auto", from 4096 tokens of a rank and 4 ranks on; with "always", if there is more than one part.
    """
    if mode == "never" or hidden_size <= PART_COLUMNS:
        return False
    return mode == "always" or (len(counts) >= _RANKS and max(counts) >= _TOKENS)


RunPart = Callable[[range, int | None], None]
"""Called with a part's columns, and the SMs to use (None: all)."""


class PartitionStream(NamedTuple):
    """A stream on a share of the SMs, and how many these are."""

    stream: torch.cuda.Stream
    num_sms: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Where a call runs what runs at the same time; the rest of it has all SMs.

    gemms          the down GEMM, from its second part on
    communication  the combine of all parts but the last
    """

    gemms: PartitionStream
    communication: PartitionStream

    @classmethod
    def of(cls, device: int, communication_sms: int) -> "Overlap":
        """Two partitions of a GPU: communication's is rounded up to whole groups of SMs, gemms has the rest.

        Raises ValueError if nothing is left.
        """
        partitions = SMPartitions(device)
        partitions.apply(sizes(communication_sms, partitions.supply))
        gemms, communication = (
            PartitionStream(partitions.stream(name), partitions.num_sms(name))
            for name in ("gemms", "communication")
        )
        return cls(gemms, communication)

    def run(self, n: int, multiply: RunPart, combine: RunPart) -> None:
        """Run `multiply` for each part of n columns, and `combine` once its columns are multiplied.

        From torch's current stream, on which everything has ended when work that follows there begins, also
        if one raises. Each is called with that stream or a lane's being current.
        """
        here = torch.cuda.current_stream()
        multiplied, *left = parts(n)
        multiply(multiplied, None)
        for lane in (self.gemms, self.communication):
            lane.stream.wait_stream(here)
        try:
            for columns in left:
                self.communication.stream.wait_stream(self.gemms.stream)
                with torch.cuda.stream(self.gemms.stream):
                    multiply(columns, self.gemms.num_sms)
                with torch.cuda.stream(self.communication.stream):
                    combine(multiplied, self.communication.num_sms)
                multiplied = columns
        finally:
            for lane in (self.gemms, self.communication):
                here.wait_stream(lane.stream)
        combine(multiplied, None)


def sizes(communication_sms: int, supply: Supply) -> dict[str, int]:
    """The SMs of each lane, as `partitions.plan` grants them. Raises ValueError if gemms would have none."""
    communication = supply.unit_sms * -(-communication_sms // supply.unit_sms)
    gemms = supply.unit_sms * supply.units + supply.spare_sms - communication
    if gemms < supply.unit_sms:
        max_sms = supply.unit_sms * (supply.units - 1)
        raise ValueError(
            f"communication_sms: expected at most {max_sms} on this GPU, got {communication_sms}"
        )
    return {"communication": communication, "gemms": gemms}


def parts(n: int) -> list[range]:
    """The columns of each part of n."""
    return [range(*ends) for ends in pairwise([*range(0, n, PART_COLUMNS), n])]
