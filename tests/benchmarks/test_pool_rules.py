"""The simulation of a pool's callers and servers; the same seed gives the same rows."""

import json
from pathlib import Path

import pytest

from benchmarks.lib.run import Row
from benchmarks.report import SECTIONS
from benchmarks.serving import pool_rules
from benchmarks.serving.pool_rules import RULES, Case, Simulation

OWN, *_ = RULES


def row_of(kind: str = "engine", rule: str = OWN, seed: int = 0, seconds: float = 1.0) -> Row:
    return Simulation(Case(kind, 0.5, rule, seed, num_callers=96, num_servers=12, seconds=seconds)).run()


def test_a_seed_gives_the_same_row_each_time() -> None:
    assert row_of() == row_of()
    assert row_of(seed=1) != row_of()


@pytest.mark.slow
def test_no_call_is_lost_when_servers_are_restarted_killed_or_hang() -> None:
    row = row_of(seconds=8.0)
    assert row["lost"] == 0
    assert 0 < row["moved"] < row["calls"]
    assert row["longest_ms"] >= 750  # of a call at the server that hangs, which is noticed by then


def test_callers_that_start_together_spread_over_the_servers() -> None:
    """With the rule of before, they all began at the first one."""
    now, before = (row_of(rule=rule) for rule in (OWN, "all, in order (before)"))
    assert now["p99_ms"] < before["p99_ms"]


def test_slow_servers_are_avoided() -> None:
    assert 4 * row_of(seconds=3.0)["slow"] < row_of(rule="random", seconds=3.0)["slow"]


@pytest.mark.slow
def test_rows_become_the_documents_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pool_rules.json"
    monkeypatch.setattr(pool_rules, "LOADS", {"open": (0.5,), "engine": (0.8,)})
    given = ["--callers", "24", "--servers", "4", "--seconds", "1", "--seeds", "2", "--json", str(file)]
    assert pool_rules.main(given) == 0
    assert len(json.loads(file.read_text())["rows"]) == 4 * len(RULES)
    header, _, *lines = SECTIONS["pool-rules"](tmp_path).splitlines()
    assert header == "| rule | 50% | engines, 80% | at the slow server, % | moved, % | lost |"
    assert [line.split(" | ")[0] for line in lines] == [f"| {rule}" for rule in RULES]
