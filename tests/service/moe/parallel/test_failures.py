"""Ranks that die, stop or never come: the others get an error in time."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from expertd.service.moe.parallel import Exchange, ExchangeError, TorchExchange, join_group
from tests.service.moe.parallel.calls import make_case
from tests.service.moe.parallel.cases import Case, run_case
from tests.service.moe.parallel.ranks import new_store, ranks_of

_ALL = (0, 1, 2)
_TIMEOUT = 10  # seconds; a busy machine begins a call on all ranks within them


def _errors(exchange: Exchange, case: Case) -> list[ExchangeError]:
    """Those of two calls, of which the first must not wait for ever, and the second not at all."""
    errors = []
    for _ in range(2):
        try:
            run_case(exchange, case)
        except ExchangeError as error:
            errors.append(error)
    assert exchange.failed is not None
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stops_fails_the_others_calls(how: signal.Signals) -> None:
    case = make_case((4, 4, 4))
    with ranks_of(3, [_ALL], _TIMEOUT) as ranks:
        for result in ranks.run(_ALL, run_case, case):
            assert not isinstance(result, Exception)
        pid = ranks.processes[1].pid
        assert pid is not None
        os.kill(pid, how)
        for rank in (0, 2):
            ranks.begin(rank, _ALL, _errors, case)
        for rank, (first, second) in zip((0, 2), ranks.finish((0, 2)), strict=True):
            start = f"dispatch of counts on rank {rank} of 3: expected every rank to take part, got: "
            assert str(first).startswith(start)
            assert str(second) == f"dispatch of counts: expected a group without failures, got: {first}"


def test_joining_ends_when_the_other_ranks_do_not_come() -> None:
    with pytest.raises(
        ExchangeError, match=r"^rank 0 joining the group: expected 2 ranks within 0\.5 s, got: "
    ):
        join_group(new_store(), 0, 2, timeout_seconds=0.5, backend="gloo")
    assert not dist.is_initialized()


def test_a_group_of_one_needs_no_other_process() -> None:
    join_group(new_store(), 0, 1, timeout_seconds=5, backend="gloo")
    try:
        case = make_case((5,))
        out, _, _ = run_case(TorchExchange(), case)
        assert torch.isfinite(out).all()
    finally:
        dist.destroy_process_group()
