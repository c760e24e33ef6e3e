"""`expertd-client bench`: what it measures, and what it says when it cannot."""

import argparse
import itertools
import json
import os
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd_client import ServerUnreachableError, __version__
from expertd_client.__main__ import main
from expertd_client.bench.arguments import add_arguments
from expertd_client.bench.case import BenchError, BenchTarget, Case, Result, Sample, summarize
from expertd_client.bench.load import Load
from expertd_client.bench.processes import Processes
from expertd_client.bench.report import num_cpus, row, write_json
from tests.expertd import HIDDEN, MODEL, RunningServer, channels_in, running_server
from tests.fakes import Peer, answer, echo, fake_server, refusal

Captured = pytest.CaptureFixture[str]


def bench(*arguments: str) -> int:
    return main(["bench", "--seconds", "0.3", "--warmup", "0.05", *arguments])


def figures(path: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return results


@pytest.mark.slow
def test_every_combination_is_measured(server: RunningServer, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "results.json"
    arguments = ["--tokens", "1,16", "--connections", "1,3", "--processes", "2", "--json", str(file)]
    assert bench("--url", server.url, *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, heading, *rows, remark = out.splitlines()
    assert (
        first == f"{server.url}: expertd {__version__}, demo, hidden size {HIDDEN}, FP32, transport channel"
    )
    assert heading.split()[:5] == ["tokens", "conns", "rate/s", "requests/s", "tokens/s"]
    assert [row.split()[:3] for row in rows] == [
        ["1", "1", "closed"],
        ["16", "1", "closed"],
        ["1", "3", "closed"],
        ["16", "3", "closed"],
    ]
    assert remark.startswith("Latencies are of whole calls")
    about = json.loads(file.read_text())
    assert about["server"] == {"url": server.url, "name": "expertd", "version": __version__}
    assert about["model"] == {"name": MODEL, "hidden_size": HIDDEN, "datatype": "FP32"}
    assert about["client"]["transport"] == "channel"
    for result in about["results"]:
        assert result["errors"] == {}
        assert 0 < result["p50_us"] <= result["p90_us"] <= result["p99_us"] <= result["max_us"]
        assert result["requests"] >= 1
        assert result["requests_per_second"] == pytest.approx(result["requests"] / result["seconds"])
        assert result["tokens_per_second"] == pytest.approx(result["requests_per_second"] * result["tokens"])
        assert 0 < result["client_cpu"] < 2
        assert result["processes"] == min(2, result["connections"])


@pytest.mark.timing
@pytest.mark.slow
def test_an_open_loop_keeps_its_rate(server: RunningServer, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "results.json"
    arguments = ["--tokens", "1", "--connections", "8", "--rate", "40,80", "--json", str(file)]
    assert main(["bench", "--url", server.url, "--seconds", "2", "--warmup", "0.05", *arguments]) == 0
    slow, fast = figures(file)
    # Five standard deviations of a Poisson process; a closed loop would send thousands.
    assert slow["requests"] == pytest.approx(80, abs=45)
    assert fast["requests"] == pytest.approx(160, abs=64)
    assert (slow["rate"], fast["rate"]) == (40, 80)
    assert "99% were sent within" in capsys.readouterr().out


def load(num: int, request: Any, case: Case) -> Load:
    return Load(case, [request] * num)


def test_latency_of_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """One connection, ten requests due at once, 20 ms each: the last waits for all others."""
    made = load(1, lambda: time.sleep(0.02), Case(1, 1, 1.0, 1.0, 0))
    sample = made.run(time.monotonic(), np.zeros(10), 60)
    assert len(sample.latencies) == 10
    for number, latency in enumerate(sorted(sample.latencies), 1):
        assert latency >= 0.02 * number
    assert sample.late.max() >= 0.18


def test_errors_are_counted_by_their_kind(tmp_path: Path, capsys: Captured) -> None:
    """A server that is busy after the first requests of the warm-up: each wrong answer is found."""
    numbers = itertools.count()

    def handle(peer: Peer) -> None:
        while True:
            request = peer.request()
            if "/infer" not in request.line:
                peer.send(answer(200, json.dumps(control(request.line)).encode()))
                continue
            number, right = next(numbers), echo(request)
            wrong = right.replace(b'"shape": [2, 3]', b'"shape": [3, 2]')
            assert wrong != right
            peer.send(right if number < 5 else wrong if number % 2 else refusal(503, "full"))

    file = tmp_path / "results.json"
    with fake_server(handle) as server:
        options = ["--tokens", "2", "--connections", "1", "--transport", "http"]
        code = bench("--url", server.url, *options, "--json", str(file))
    assert code == 1
    (result,) = figures(file)
    assert set(result["errors"]) == {"ServerBusyError", "InvalidAnswerError"}
    out = capsys.readouterr().out
    assert "2 tokens, 1 connections: expected " in out
    assert " ServerBusyError" in out


def control(line: str) -> Any:
    """A server's answer to a GET or to the index."""
    tensors = [{"name": name, "datatype": "FP32", "shape": [-1, 3]} for name in ("hidden_states", "topk_ids")]
    paths = {
        "/v2": {"name": "fake", "version": "7", "extensions": []},
        "/v2/repository/index": [{"name": "m", "state": "READY"}],
        "/v2/models/m": {"name": "m", "inputs": tensors},
    }
    return paths[line.split()[1]]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tokens", "0"), ("--tokens", "1,x"), ("--connections", "-1"), ("--rate", "nan"), ("--seconds", "0")],
)
def test_wrong_numbers(capsys: Captured, flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", f"{flag}={value}"])
    assert caught.value.code == 2
    assert "expected positive numbers below 1e+09, got" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "expected"), [("0", 0.0), ("0.0", 0.0), ("0.5", 0.5)])
def test_there_may_be_no_warmup(given: str, expected: float) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--warmup", given]).warmup == expected


def test_the_version(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"expertd-client {__version__}\n"


def test_a_summary_of_nothing() -> None:
    nothing = Sample(np.array([]), np.array([]), Counter({"ServerBusyError": 3}), 2, 1.0, 0.5)
    result = summarize(Case(1, 1, 5.0, 1.0, 0), [nothing, nothing])
    assert (result.requests, result.failed, result.errors) == (0, 10, {"ServerBusyError": 6})
    assert result.as_json()["p99_us"] is None
    json.dumps(result.as_json(), allow_nan=False)


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
    target = BenchTarget("http://127.0.0.1:1", "http", "m", 3, "FP32", 1.0)
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
    target = BenchTarget("http://127.0.0.1:1", "http", "m", 3, "FP32", 1.0)
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
