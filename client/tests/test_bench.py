"""`expertd-client bench`."""

import argparse
import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd_client import ExpertError, __version__
from expertd_client.__main__ import main
from expertd_client.bench.arguments import add_arguments
from expertd_client.bench.case import Case, Sample, summarize
from expertd_client.bench.load import Load, hidden_states
from tests.expertd import HIDDEN, MODEL, RunningServer
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


def test_an_open_loop_gives_up_in_the_end() -> None:
    slow = load(1, lambda: time.sleep(0.05), Case(1, 1, 1.0, 0.1, 0))
    sample = slow.run(time.monotonic(), np.zeros(1000), patience=0.1)
    assert 1 <= len(sample.latencies) <= 4
    assert sample.unsent == 1000 - len(sample.latencies)


def test_the_warm_up_does_not_count() -> None:
    numbers = itertools.count()

    def request() -> None:
        if next(numbers) == 0:
            raise ExpertError("cold")

    made = load(1, request, Case(1, 1, None, 1e-9, 1e-9))
    made.warm_up()
    sample = made.run(time.monotonic(), None, 60)
    assert (len(sample.latencies), dict(sample.errors), next(numbers)) == (1, {}, 2)


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


@pytest.mark.parametrize(
    ("datatype", "dtype"), [("FP32", np.float32), ("FP16", np.float16), ("BF16", np.uint16)]
)
def test_hidden_states_of_each_datatype(datatype: str, dtype: Any) -> None:
    values = hidden_states(64, 32, datatype, np.random.default_rng(0))
    assert (values.shape, values.dtype) == ((64, 32), dtype)
    floats = (values.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else values
    assert floats.astype(np.float64).std() == pytest.approx(1, abs=0.1)


def test_a_summary_of_nothing() -> None:
    nothing = Sample(np.array([]), np.array([]), Counter({"ServerBusyError": 3}), 2, 1.0, 0.5)
    result = summarize(Case(1, 1, 5.0, 1.0, 0), [nothing, nothing])
    assert (result.requests, result.failed, result.errors) == (0, 10, {"ServerBusyError": 6})
    assert result.as_json()["p99_us"] is None
    json.dumps(result.as_json(), allow_nan=False)
