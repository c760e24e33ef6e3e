"""The soak of device calls, without GPUs: what it compares, and what it calls a failure."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.service.channels.call_server import LAYERS, NAMES
from tests.soak import device_calls
from tests.soak.device_calls import CALLS, POOL, ROUND, SLOTS, TOKENS, WORD, Counted, Pool, Round

HIDDEN = 16


class Layers:
    """A channel whose calls are computed at once, by other layers than experts."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.chosen: list[int] = []  # the first id of each call
        self.loses: int | None = None  # the number of a call without an output
        self._waits: dict[int, Tensor] = {}

    @staticmethod
    def output(name: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        scale = (ids * weights).sum(1, keepdim=True) + NAMES.index(name)
        return (x.float() * scale).bfloat16()

    def send(self, x: Tensor, ids: Tensor, weights: Tensor, *, model: str, slot: int) -> None:
        assert slot not in self._waits
        self._waits[slot] = self.output(model, x, ids, weights)
        self.calls.append((model, slot))
        self.chosen.append(int(ids[0, 0]))

    def wait(self, out: Tensor, *, slot: int) -> None:
        output = self._waits.pop(slot)
        if len(self.calls) - len(self._waits) - 1 != self.loses:
            out.copy_(output)


def pool(tokens: int) -> Pool:
    given = (
        torch.randn(POOL, tokens, HIDDEN).bfloat16(),
        torch.arange(POOL).int()[:, None, None].expand(POOL, tokens, 4).contiguous(),
        torch.rand(POOL, tokens, 4) + 0.5,
    )
    outs = [Layers.output(name, *(tensor[row] for tensor in given)) for name in NAMES for row in range(POOL)]
    return Pool(given, torch.stack(outs))


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("tokens", [1, 7])
def test_rounds_call_all_layers_in_all_slots_with_all_inputs(tokens: int, first: int) -> None:
    channel, mismatches = Layers(), torch.zeros((), dtype=torch.int64)
    one = Round(pool(tokens), first, mismatches)
    for _ in range(POOL):
        one.enqueue(channel)
    assert mismatches == 0
    assert set(Counter(channel.calls[:ROUND]).values()) == {ROUND // LAYERS // SLOTS}
    assert len(set(channel.calls)) == LAYERS * SLOTS
    for call in range(ROUND):
        assert set(channel.chosen[call::ROUND]) == set(range(POOL))


def test_each_word_that_differs_is_counted() -> None:
    channel, mismatches, given = Layers(), torch.zeros((), dtype=torch.int64), pool(7)
    one = Round(given, 0, mismatches)
    given.expected.view(torch.int64).bitwise_xor_(1)
    one.enqueue(channel)
    assert mismatches == ROUND * 7 * HIDDEN // WORD
    given.expected.view(torch.int64).bitwise_xor_(1)
    mismatches.zero_()
    channel.loses = ROUND + 5
    one.enqueue(channel)
    assert mismatches == 7 * HIDDEN // WORD, "of an output that was not written"


def text_of(counts: dict[str, Counted]) -> str:
    lines = []
    for metric, place in (("expertd_device_calls", 0), ("expertd_device_call_tokens", 1)):
        lines.append(f"# TYPE {metric}_total counter")
        lines += [f'{metric}_total{{model="{name}"}} {float(each[place])}' for name, each in counts.items()]
    return "\n".join(["# TYPE expertd_channels gauge", "expertd_channels 3.0", *lines, ""])


def test_counts_are_read_from_metrics() -> None:
    counts = {name: Counted(10**9 + number, 10**12 + number) for number, name in enumerate(NAMES)}
    assert device_calls.counted_in(text_of(counts)) == counts


class FakeServer:
    """Calls wait while there is none."""

    alive: "FakeServer | None" = None
    starts, forgets = 0, 0  # calls that are not counted

    def __init__(self, folder: Path, port: int | None = None) -> None:
        assert FakeServer.alive is None
        self.url, self.port, self.process = "http://fake", 1, None
        self.counts = Counter[str]()
        FakeServer.alive = self
        FakeServer.starts += 1

    def is_ready(self) -> bool:
        return True

    def metrics(self) -> str:
        calls, tokens = (self.counts[each] // LAYERS for each in ("calls", "tokens"))
        return text_of(dict.fromkeys(NAMES, Counted(calls - self.forgets, tokens)))

    def kill(self) -> None:
        FakeServer.alive = None

    close = kill


class FakeCaller:
    differs_after: float = float("inf")
    fails_after: float = float("inf")

    def __init__(self, url: str, number: int) -> None:
        self.made, self.replays, self.pending = Counter[str](), 0, list[int]()
        self.channel, self.is_closed = self, False

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    @property
    def mismatches(self) -> int:
        return int(self.replays >= self.differs_after)

    def prove(self) -> None:
        self.replay(1)
        self.collect()

    def replay(self, tokens: int) -> None:
        assert tokens in TOKENS
        self.pending.append(tokens)

    def collect(self) -> None:
        if FakeServer.alive is not None:
            for tokens in self.pending:
                more = {"calls": CALLS, "tokens": CALLS * tokens}
                self.made.update(more)
                FakeServer.alive.counts.update(more)
                self.replays += 1
            self.pending.clear()

    def check(self) -> None:
        if self.replays >= self.fails_after:
            raise RuntimeError("channel: closed")

    def close(self) -> None:
        assert not self.pending


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(FakeServer, "alive", None)
    monkeypatch.setattr(FakeServer, "starts", 0)
    monkeypatch.setattr(device_calls, "Server", FakeServer)
    monkeypatch.setattr(device_calls, "Caller", FakeCaller)
    monkeypatch.setattr(device_calls, "MOMENT_SECONDS", 0.01)
    monkeypatch.setattr(device_calls, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(device_calls, "endless_caller", lambda _: another("called"))
    return monkeypatch


def another(prints: str) -> "subprocess.Popen[str]":
    program = f"import signal; print({prints!r}, flush=True); signal.pause()"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("callers", "kills"), [(1, 0), (4, 0), (3, 2)])
def test_a_soak_makes_its_calls_and_kills(
    tmp_path: Path, callers: int, kills: int, fakes: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.setattr(device_calls, "REPORT_SECONDS", 0.0)
    file = tmp_path / "soak.json"
    arguments = ["--calls", "50000", "--callers", str(callers), "--kills", str(kills), "--json", str(file)]
    assert device_calls.main([*arguments, "--seconds", "120", "--seed", "7"]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["calls"] >= result["asked"] == 50_000
    assert "calls/s, for 50,000 of 50,000 in time" in capsys.readouterr().out
    assert result["calls_per_s"] > 0
    assert (result["compared_with_metrics"] == result["calls"]) is (kills == 0)
    assert result["compared_with_metrics"] > 0
    expected = {"callers": callers, "kills": kills, "seed": 7, "mismatches": 0, "failure": None}
    assert {name: result[name] for name in expected} == expected
    assert FakeServer.starts == 1 + kills
    assert FakeServer.alive is None


@pytest.mark.parametrize(
    ("of", "name", "value", "message"),
    [
        (FakeCaller, "differs_after", 9, "RuntimeError: outputs of caller 0: 1 words differ"),
        (FakeCaller, "fails_after", 9, "RuntimeError: channel: closed"),
        (FakeServer, "forgets", 1, f"RuntimeError: metrics of {NAMES[0]}: expected Counted"),
        (FakeServer, "is_ready", lambda _: False, "TimeoutError: not in time: the server is ready"),
        (device_calls, "endless_caller", lambda _: another("no"), "RuntimeError: another caller: expected"),
    ],
)
def test_what_goes_wrong_is_a_failure(
    fakes: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of: Any,
    name: str,
    value: Any,
    message: str,
) -> None:
    fakes.setattr(of, name, value)
    if name == "is_ready":
        fakes.setattr(device_calls, "END_SECONDS", 2 * 119.9)  # so that 0.1 s are left
    assert device_calls.main(["--calls", "50000", "--kills", "1", "--seconds", "120"]) == 1
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["failure"].startswith(message)


@pytest.mark.parametrize(
    "arguments", [["--calls", "0"], ["--seconds", "59"], ["--callers", "33"], ["--kills", "-1"], ["x"]]
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device_calls.main(arguments)
    assert "error: " in capsys.readouterr().err


def test_one_gpu_is_not_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_calls.main([]) == 1
    assert capsys.readouterr().err == "soak: expected two GPUs, of the server and its callers, got 1\n"
