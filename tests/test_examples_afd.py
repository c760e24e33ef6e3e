"""Ping-pong: the order of calls, the results, what the times amount to, and the picture."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from examples.afd import attention
from examples.afd.experts import Ticket
from examples.afd.intervals import Interval, Times, read_timeline, times, write_timeline
from examples.afd.timeline import draw
from examples.afd.worker import Attention, AttentionSizes, Worker, norm

pytestmark = pytest.mark.thorough

HIDDEN, TOKENS, LAYERS = 32, 3, 3
SVG = "{http://www.w3.org/2000/svg}"


class RecordedExperts:
    """A layer that multiplies; `calls` has the order in which a worker used all layers."""

    def __init__(self, layer: int, calls: list[str]) -> None:
        self._layer, self._calls = layer, calls
        self._inputs: dict[int, Tensor] = {}

    def compute(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * (self._layer + 2)

    def submit(self, slot: int, hidden_states: Tensor) -> Ticket:
        self._calls.append(f"submit {'AB'[slot]}{self._layer}")
        assert slot not in self._inputs
        self._inputs[slot] = hidden_states
        return Ticket(slot, 0.0)

    def wait(self, ticket: Ticket) -> Tensor:
        self._calls.append(f"wait {'AB'[ticket.slot]}{self._layer}")
        ticket.end = 1.0
        return self.compute(self._inputs.pop(ticket.slot))


@pytest.fixture
def one_thread_at_most_here() -> Iterator[None]:
    """The example's number of threads does not stay for other tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tiny_attention() -> Attention:
    return Attention(AttentionSizes(HIDDEN, TOKENS, context=5, heads=2), "cpu", torch.float32)


@pytest.mark.parametrize(
    ("pingpong", "order"),
    [
        (True, "submit A0, submit B0, wait A0, submit A1, wait B0, submit B1, wait A1, wait B1"),
        (False, "submit A0, wait A0, submit B0, wait B0, submit A1, wait A1, submit B1, wait B1"),
    ],
)
def test_experts_are_waited_for_after_the_other_attention(pingpong: bool, order: str) -> None:
    calls: list[str] = []
    worker = Worker(tiny_attention(), [RecordedExperts(layer, calls) for layer in range(2)])
    worker.run(list(torch.randn(2, TOKENS, HIDDEN)), pingpong)
    assert ", ".join(calls) == order


@pytest.mark.parametrize("pingpong", [True, False])
def test_each_micro_batch_passes_all_layers(pingpong: bool) -> None:
    made, layers = tiny_attention(), [RecordedExperts(layer, []) for layer in range(LAYERS)]
    batches = torch.randn(2, TOKENS, HIDDEN)
    worker = Worker(made, layers)
    outputs = worker.run(list(batches), pingpong)
    for batch, output in zip(batches, outputs, strict=True):
        expected = batch
        for layer in layers:
            expected = made(expected)
            expected = expected + layer.compute(norm(expected))
        assert output.equal(expected)
        assert not output.allclose(batch)
    assert {(i.what, i.slot, i.layer) for i in worker.intervals} == {
        (what, slot, layer) for what in ("attention", "experts") for slot in "AB" for layer in range(LAYERS)
    }


def intervals(*spans: tuple[str, float, float]) -> Sequence[Interval]:
    return [
        Interval("attention" if what == "attention" else "experts", "AB"[index % 2], 0, begin, end)
        for index, (what, begin, end) in enumerate(spans)
    ]


def test_times_count_what_runs_at_once_only_once() -> None:
    measured = times(
        intervals(
            ("attention", 10.0, 12.0), ("attention", 12.0, 14.0),  # 4 s
            ("experts", 12.0, 15.0), ("experts", 14.0, 18.0),  # 6 s: one waits for the other
        )
    )  # fmt: skip
    assert measured == Times(attention=4.0, experts=6.0, both=2.0, wall=8.0)
    assert measured.overlap == 0.5
    assert measured.saved == pytest.approx(0.2)


def test_a_timeline_is_drawn_as_it_was_written(tmp_path: Path) -> None:
    given = intervals(("attention", 5.0, 6.0), ("experts", 6.0, 8.0), ("attention", 6.0, 7.0))
    file, pictures = tmp_path / "timeline.json", [tmp_path / "one.svg", tmp_path / "two.svg"]
    write_timeline(file, {"title": "tiny"}, given)
    about, read = read_timeline(file)
    assert about == {"title": "tiny"}
    assert [(i.begin, i.end) for i in read] == [(0.0, 1.0), (1.0, 3.0), (1.0, 2.0)]
    assert times(read) == times(given)
    for picture in pictures:
        draw(file, picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    root = ElementTree.fromstring(pictures[0].read_text())
    bars = [g for g in root.iter(f"{SVG}g") if g.get("id", "").startswith(("PolyCollection", "FillBetween"))]
    assert len(bars) == len(given)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["channel", "http"])
def test_both_orders_give_the_same_through_a_server(
    tmp_path: Path, one_thread_at_most_here: None, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    file = tmp_path / "timeline.json"
    sizes = "--layers 3 --served-layers 2 --tokens 8 --context 16 --hidden-size 256 --intermediate-size 128"
    options = [*sizes.split(), "--repeat", "1", "--json", str(file), "--transport", transport]
    assert attention.main(options) == 0
    sequential, pingpong, ratio, results = capsys.readouterr().out.splitlines()
    assert sequential.startswith("sequential wall ")
    assert "overlap 0%" in sequential
    assert pingpong.startswith("ping-pong  wall ")
    assert ratio.endswith(f"of the sequential time, by {transport}")
    assert results.startswith("results differ by 0.")
    about, measured = read_timeline(file)
    assert len(measured) == 3 * 2 * 2
    assert all(i.begin < i.end for i in measured)
    assert json.loads(file.read_text())["about"]["options"]["tokens"] == "8"
    draw(file, tmp_path / "timeline.svg")
    assert about["title"].startswith(f"two micro-batches of 8 tokens by {transport}")


@pytest.mark.gpu
@pytest.mark.slow
def test_both_orders_give_the_same_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--device", "cuda", "--layers", "6", "--served-layers", "2"]) == 0
    assert "results differ by 0.00000%" in capsys.readouterr().out
