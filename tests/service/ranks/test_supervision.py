"""What keeps ranks running when starting, rendezvous or hearing them fails; with fakes for the processes."""

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from expertd.service.ranks.front import group, supervisor
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.front.rank import Inbox
from expertd.service.ranks.front.supervisor import Supervisor
from expertd.service.ranks.nodes import agent
from expertd.service.ranks.recording import write_trace
from tests.paths import ROOT
from tests.service.apps import tiny_settings
from tests.service.processes import forked_python
from tests.service.ranks import signalled
from tests.service.ranks.nodes import node_settings


@pytest.fixture
def supervising() -> Iterator[Supervisor]:
    """A supervisor without ranks."""
    one = Supervisor(tiny_settings(ranks=2))
    yield one
    one._listener.close()


def test_an_unexpected_error_does_not_end_the_supervision(
    supervising: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[str | None] = []

    def run_all(_: object) -> None:
        runs.append(supervising._why)
        supervising._has_served = True
        if len(runs) == 1:
            raise KeyError("an expert")
        supervising._stopped = True

    monkeypatch.setattr(supervising, "_run_all", run_all)
    supervising._run()
    assert len(runs) == 2
    assert runs[1] == "the ranks could not be started again: 'an expert'"
    assert "KeyError" in caplog.text, "with a traceback"


def test_an_agent_whose_ranks_do_not_start_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(agent, "start_ranks", start)
    one = agent._Agent(node_settings().model_copy(update={"node_rank": 1}))
    reports: list[tuple[int, str]] = []
    session = SimpleNamespace(rendezvous=None, report=lambda *report: reports.append(report))
    one._run_group(cast(Any, session), 3)
    why = "the ranks cannot be started: [Errno 24] Too many open files (node 1)"
    assert reports == [(3, why)]


def test_what_the_system_refuses_at_the_start_is_one_sentence(
    supervising: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(supervisor, "start_ranks", start)
    supervising._run()
    assert str(supervising._failure) == "the ranks cannot be started: [Errno 24] Too many open files"
    assert supervising._failure is not None
    assert supervising._failure.is_expected
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_a_signal_may_interrupt_an_agents_wait_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lock that its handler waits for, it would hang."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    assert forked_python(Path(signalled.__file__)).returncode == 0


def test_answers_of_ranks_have_the_time_of_the_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_ANSWER_SECONDS", 0.01)
    inbox = Inbox()
    rank = SimpleNamespace(number=0, answer=None, send=lambda *_: None)
    ranks = RankGroup(1, cast(Any, [rank]), inbox, 5.0)

    def answer() -> None:
        rank.answer = ["", []]
        inbox.wake()

    timer = threading.Timer(0.3, answer)
    timer.start()
    assert ranks.ask("partitions", {}) == {0: ["", []]}
    timer.join()


def test_the_file_of_a_refused_trace_is_closed() -> None:
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())

    def refused() -> bytes:
        raise ValueError("nothing was recorded")

    with pytest.raises(ValueError, match="nothing was recorded"):
        write_trace(descriptor, refused)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
