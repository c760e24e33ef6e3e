"""Bytes made from a corpus by random changes. `CASES` of the environment is their number, for each target.

A mutator of its own, without coverage: it needs no instrumented build, gives the same cases in every run and
on every machine, and knows what the grammars have, so that the tests of every change can run it.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CASES = int(os.environ.get("CASES", "2000"))
SENT: Counter[str] = Counter()  # "cases": all that were sent so far
CORPUS = Path(__file__).parent / "corpus"
_MAX_BYTES = 4096
_NUMBERS = (0, 1, 3, 64, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
Change = Callable[[random.Random, bytearray, int], None]


def cases(name: str, tokens: Sequence[bytes] = (), seed: int = 0) -> Iterator[bytes]:
    """The corpus of this name, then what changes make of it; `tokens` are what its grammar has.

    The same seed gives the same cases. What fails belongs into the corpus.
    """
    seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert seeds
    SENT["cases"] += len(seeds)
    yield from seeds
    chance = random.Random(f"{name}-{seed}")
    pool = list(seeds)
    for _ in range(CASES):
        data = bytearray(chance.choice(pool))
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            _change(chance, data, chance.choice(pool), tokens)
        made = bytes(data[:_MAX_BYTES])
        if chance.random() < 0.01:  # changes of changes
            pool[len(seeds) + chance.randrange(64) :] = [made]
        SENT["cases"] += 1
        yield made


def _change(chance: random.Random, data: bytearray, other: bytes, tokens: Sequence[bytes]) -> None:
    place = chance.randrange(len(data) + 1)
    end = min(len(data), place + chance.choice((1, 2, 4, 8, 64)))
    kind = chance.randrange(7)
    if kind == 0 and place < len(data):
        data[place] ^= 1 << chance.randrange(8)
    elif kind == 1:
        data[place:end] = b""
    elif kind == 2:
        data[place:place] = chance.randbytes(chance.choice((1, 2, 8)))
    elif kind == 3:
        data[place:place] = data[place:end] * chance.choice((1, 2, 50))
    elif kind == 4:
        size = chance.choice((1, 2, 4, 8))
        number = chance.choice(_NUMBERS) % (1 << 8 * size)
        data[place : place + size] = number.to_bytes(size, "little")
    elif kind == 5:
        begin = chance.randrange(len(other) + 1)
        data[place:end] = other[begin : begin + chance.choice((4, 16, 256))]
    elif tokens:
        data[place : chance.choice((place, end))] = chance.choice(tokens)
