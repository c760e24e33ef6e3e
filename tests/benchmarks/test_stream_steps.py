"""The parts of `benchmarks stream_steps` that need no GPU."""

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.serving import stream_steps


class Mark:
    """An event at a time in ms."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, other: "Mark") -> float:
        return other.ms - self.ms


@pytest.mark.parametrize("callers", [1, 3])
def test_callers_at_once_have_one_rate(callers: int) -> None:
    """Each makes 200 steps of 4 layers, at a pace of its own, from its own beginning on."""
    starts = [random.uniform(0, 5) for _ in range(callers)]
    paces = [random.uniform(1, 2) for _ in range(callers)]
    ends = [
        [Mark(start + pace * step) for step in range(201)] for start, pace in zip(starts, paces, strict=True)
    ]
    row = stream_steps.rates(ends, 4, 100.0)
    last = max(start + 200 * pace for start, pace in zip(starts, paces, strict=True))
    assert row["calls_per_s"] == pytest.approx(callers * 200 * 4 / (last - min(starts)) * 1e3)
    assert row["step_ms"] == pytest.approx(sorted(paces)[callers // 2])
    assert row["p99_ms"] == pytest.approx(max(paces))
    assert row["layer_us"] == pytest.approx(row["step_ms"] * 1e3 / 4 - 100)


def test_rows_say_what_a_call_takes_above_the_layer_and_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways' rows at the link's rate; of several callers at once, nothing is above a layer's own time."""
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(stream_steps, "ExpertClient", lambda *_, **__: nullcontext())
    monkeypatch.setattr(
        stream_steps, "measure", lambda case, *_: case._asdict() | {"layer_us": 30.0 + case.tokens}
    )
    options: Any = SimpleNamespace(ways="stream,graph", tokens="1,64", between="0", callers="1,8", layers=8)
    alone = stream_steps.Alone({1: 20.0, 64: 80.0}, link_bytes_per_us=1e5)
    result: Any = SimpleNamespace(put=rows.append)
    stream_steps.run(options, "", "cuda:1", alone, result)
    assert [(row["way"], row["tokens"], row["callers"]) for row in rows] == [
        ("stream", 1, 1), ("stream", 64, 1),
        ("graph", 1, 1), ("graph", 1, 8), ("graph", 64, 1), ("graph", 64, 8),
    ]  # fmt: skip
    for row in rows:
        assert row["own_us"] == {1: 20.0, 64: 80.0}[row["tokens"]]
        assert row.get("over_us") == ({1: 11.0, 64: 14.0}[row["tokens"]] if row["callers"] == 1 else None)
        assert row["link_us"] == pytest.approx(row["tokens"] * 2 * 4096 / 1e5)
    same_gpu = stream_steps.Alone(alone.own_us)
    assert "link_us" not in same_gpu.beside(rows[0])


class Caller:
    """Steps whose output is the input plus the layer's number, but for what `spoil` does."""

    names = "layers.0", "layers.1"

    def __init__(self, spoil: Any = None) -> None:
        self.given = torch.randn(3, 8).bfloat16(), torch.zeros(3, 2).int(), torch.rand(3, 2)
        self.outs = [infer(name, *self.given) for name in self.names]  # as of an earlier step
        self.spoil = spoil

    def step(self) -> None:
        for name, out in zip(self.names, self.outs, strict=True):
            if self.spoil == name:
                continue
            out.copy_(infer(name, *self.given))
        if callable(self.spoil):
            self.spoil(self.outs)


def infer(name: str, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x + int(name[-1])


def flip(outs: list[torch.Tensor]) -> None:
    """The last bit of one value."""
    outs[1].view(torch.int16)[2, 5] ^= 1


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [(None, None), ("layers.0", "layers.0"), ("layers.1", "layers.1"), (flip, "layers.1")],
)
def test_outputs_are_those_by_http(spoil: Any, wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every caller and layer, and written by the step that is looked at."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    callers: list[Any] = [Caller(), Caller(spoil)]
    client: Any = SimpleNamespace(infer=infer)
    if wrong is None:
        stream_steps.check(callers, client)
        return
    with pytest.raises(RuntimeError, match=f"^caller 1, {wrong}: expected the bits by HTTP, got others$"):
        stream_steps.check(callers, client)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ways", "stream,graphs"], "--ways: expected some of stream, host, graph, got graphs"),
        (["--ways", ""], "--ways: expected some of stream, host, graph, got "),
        (["--callers", "0"], "--callers: expected 1 to 32, got 0"),
        (["--callers", "8,33"], "--callers: expected 1 to 32, got 33"),
    ],
)
def test_invalid_options_are_refused(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["stream_steps", *options])
    with pytest.raises(SystemExit):
        stream_steps.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
