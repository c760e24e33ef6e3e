"""What every process of a soak is told."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from tests.service.keys import key_of
from tests.soak.reference import MAX_TOKENS, Sample
from tests.soak.tally import Stage, Tally


@dataclass(frozen=True)
class Plan:
    """Where the server is, and what is sent."""

    folder: Path
    port: int
    grpc_port: int
    samples: list[Sample]
    stage: Stage
    slots: int = 8  # of the callers' channels
    pause: float = 0.0  # seconds, before the next of the right requests
    key: str = field(default_factory=lambda: key_of("infer"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pick(self, chance: random.Random, datatype: str | None = None, tokens: int = MAX_TOKENS) -> Sample:
        """One of at most `tokens` tokens, and of a datatype if that is given."""
        found = [
            sample
            for sample in self.samples
            if sample.datatype in (datatype or sample.datatype) and len(sample.hidden_states) <= tokens
        ]
        return chance.choices(found, [sample.share for sample in found])[0]


def priority(chance: random.Random) -> int:
    """Of a request; most have none."""
    return chance.choice((0, 0, 0, 1, 100, 255))


def seeded(tally: Tally) -> random.Random:
    """Random numbers of one process."""
    return random.Random(f"{tally.kind}-{os.getpid()}")
