"""Four ranks, which all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.service.moe.parallel.calls import GROUPS, NODES
from tests.service.moe.parallel.ranks import Ranks, ranks_of


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    with ranks_of(4, [*GROUPS.values(), NODES[1]], timeout_seconds=120) as started:
        yield started
