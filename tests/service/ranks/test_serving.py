"""A server with several ranks answers as one with a single process does."""

import pytest

from tests.service.apps import (
    rows,
    serving,
    tiny_settings,
)
from tests.service.ranks.servers import close, output_for, serving_ranks


@pytest.mark.parametrize("ranks", [2, 4])
async def test_outputs_are_those_of_one_process(ranks: int) -> None:
    async with serving(tiny_settings()) as one, serving_ranks(tiny_settings(ranks=ranks)) as server:
        for num_tokens in (1, 2, 3, 5, 64):  # fewer tokens than ranks, and more
            values = rows(num_tokens, seed=num_tokens)
            assert close(await output_for(server, values), await output_for(one, values)), num_tokens
