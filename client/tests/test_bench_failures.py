"""What `expertd-client bench` says when it cannot measure, or no more."""

import json
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from expertd_client import ServerUnreachableError
from expertd_client.bench.case import BenchError, Case, Result, Target
from expertd_client.bench.load import Load
from expertd_client.bench.processes import Processes
from expertd_client.bench.report import num_cpus, row, write_json
from tests.expertd import channels_in, running_server
from tests.test_bench import Captured, bench


def test_no_server(capsys: Captured) -> None:
    assert bench("--url", "http://127.0.0.1:1") == 2
    assert capsys.readouterr().err.startswith(
        "expertd-client bench: server http://127.0.0.1:1: expected a connection, got"
    )


@pytest.mark.parametrize(
    ("file", "reason"), [("/no/such/x.json", "No such file or directory"), ("/dev", "Is a directory")]
)
def test_a_file_that_cannot_be_written_to(capsys: Captured, file: str, reason: str) -> None:
    assert bench("--url", "http://127.0.0.1:1", "--json", file) == 2
    text = f"expertd-client bench: --json: expected a file that can be written to, got {file}: {reason}\n"
    assert capsys.readouterr().err == text


@pytest.mark.slow
def test_what_cannot_be_measured(capsys: Captured, tmp_path: Path) -> None:
    with running_server(tmp_path, "channels.socket=null") as server:
        for arguments, text in (
            (["--model", "other"], "model: expected demo, got 'other'"),
            (["--transport", "channel"], "channels: expected the setting channels.socket, got null"),
        ):
            assert bench("--url", server.url, *arguments) == 2
            assert capsys.readouterr().err.startswith(f"expertd-client bench: {text}")


def test_a_process_that_dies_is_reported() -> None:
    target = Target("http://127.0.0.1:1", "http", "m", 3, "FP32", 1.0)
    with Processes(target, 1) as made:
        made._processes[0].kill()
        with pytest.raises(BenchError, match="expected it to go on, got its end"):
            made.measure(Case(1, 1, None, 0.1, 0.1), lambda seconds: None)


class Flaky:
    """A request that finds no server, except for each tenth of those that are made while it `recovers`."""

    def __init__(self, recovers: bool) -> None:
        self.count = 0
        self._recovers = recovers

    def __call__(self) -> None:
        self.count += 1
        if not (self._recovers and self.count % 10 == 0):
            raise ServerUnreachableError("server http://x: expected a connection, got none")


@pytest.mark.parametrize("due", [None, np.linspace(0, 3600, 6_000_000)])
def test_a_load_ends_a_second_after_its_server(due: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> None:
    request, began = Flaky(recovers=False), time.monotonic()
    with pytest.raises(BenchError, match=r"^server http://x: expected a connection, got none \(for 1 s\)$"):
        Load(Case(1, 4, None, 3600, 0), [request] * 4).run(began, due, 3600)
    assert time.monotonic() - began >= 1
    assert request.count <= 404  # it does not spin


def test_a_warm_up_ends_too() -> None:
    with pytest.raises(BenchError, match=r"\(for 1 s\)$"):
        Load(Case(1, 1, None, 60, 60), [Flaky(recovers=False)]).warm_up()


def test_a_server_that_comes_back_is_measured_on() -> None:
    request = Flaky(recovers=True)
    sample = Load(Case(1, 1, None, 1.3, 0), [request]).run(time.monotonic(), None, 60)
    assert len(sample.latencies) >= 1
    assert sample.errors["ServerUnreachableError"] + len(sample.latencies) == request.count


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "channel"])
def test_a_server_that_goes_away(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Also if each case takes less than a second. What was measured before is kept."""
    results: list[Result] = []

    def row_then_kill(result: Result) -> str:
        results.append(result)
        if len(results) == 2:
            server.process.kill()
        return row(result)

    monkeypatch.setattr("expertd_client.bench.arguments.row", row_then_kill)
    file = tmp_path / "results.json"
    sizes = ",".join(["1"] * 50)
    arguments = ["--transport", transport, "--connections", "4", "--tokens", sizes, "--processes", "2"]
    with running_server(tmp_path, channels_in(tmp_path)) as server:
        assert bench("--url", server.url, *arguments, "--json", str(file)) == 2
    kept = json.loads(file.read_text())["results"]
    assert kept == [result.as_json() for result in results]
    assert 2 <= len(kept) < 20
    (error,) = capfd.readouterr().err.splitlines()  # and none of the processes that send
    assert error.startswith("expertd-client bench: ")
    assert error.endswith(" (for 1 s)")


def test_a_file_is_not_made_before_there_is_something_to_write(capsys: Captured, tmp_path: Path) -> None:
    (old := tmp_path / "old.json").write_text("old")
    for file in (tmp_path / "new.json", old):
        assert bench("--url", "http://127.0.0.1:1", "--json", str(file)) == 2
        assert "expected a connection" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "old"


def test_no_part_of_a_file_is_left(tmp_path: Path) -> None:
    target = Target("http://127.0.0.1:1", "http", "m", 3, "FP32", 1.0)
    (tmp_path / "link.json").symlink_to("/dev/full")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, reason in (("new.json", "File too large"), ("link.json", "No space left on device")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(BenchError) as caught:
                write_json(tmp_path / name, target, {}, [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert str(caught.value) == f"--json: expected room for {tmp_path / name}, got an error: {reason}"
    assert [path.name for path in tmp_path.iterdir()] == ["link.json"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs an affinity mask")
def test_only_the_cpus_of_this_process_count() -> None:
    before = os.sched_getaffinity(0)
    assert num_cpus() == len(before)
    os.sched_setaffinity(0, {max(before)})
    try:
        assert num_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)
