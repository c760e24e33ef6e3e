"""The parts of `benchmarks overlap` that need no GPU: options, timeline, files, table and picture."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import pictures
from benchmarks.lib.markdown import NOT_MEASURED
from benchmarks.ranks import overlap
from benchmarks.ranks.overlap_timeline import LANES, Event, chrome_trace, step_of
from benchmarks.report import SECTIONS

MAIN, GEMMS, COMMUNICATION = (1, 7), (9, 21), (10, 7)  # contexts and streams
STEP = (  # kernel, its context and stream, start, duration
    ("permutation_of_ranks", MAIN, 0.5, 2.0),
    ("dispatch_rows", MAIN, 2.0, 8.0),
    ("grouped_gemm", MAIN, 10.0, 30.0),
    ("grouped_gemm", MAIN, 40.0, 5.0),
    ("combine_rows", COMMUNICATION, 46.0, 7.0),
    ("grouped_gemm", GEMMS, 46.25, 6.0),
    ("combine_rows", MAIN, 54.0, 3.5),
)


def kernel(name: str, place: tuple[int, int], ts: float, dur: float) -> dict[str, Any]:
    args = {"context": place[0], "stream": place[1]}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def call(begin: float) -> list[dict[str, Any]]:
    """What the profiler sees of a call: a fill, a pause, a barrier that ends at `begin`, and the launches."""
    before = [("FillFunctor", 900.0, 100.0), ("spin_kernel", 700.0, 600.0), ("barrier_kernel", 90.0, 90.0)]
    around = [kernel(f"void at::{name}(int)", MAIN, begin - ago, dur) for name, ago, dur in before]
    return [*around, *(kernel(name, place, begin + ts, dur) for name, place, ts, dur in STEP)]


def trace() -> list[dict[str, Any]]:
    """Two calls, in no order, among events that are no kernels."""
    other = kernel("combine_rows", MAIN, 5100.0, 50.0) | {"cat": "gpu_user_annotation"}
    return [{"ph": "M", "name": "process_name", "pid": 0}, other, *reversed([*call(1000.0), *call(5000.0)])]


def test_a_timeline_has_the_launches_after_the_last_barrier() -> None:
    expected = [
        ("all SMs", "permutation", 0.5, 2.5),
        ("all SMs", "dispatch", 2.0, 10.0),
        ("all SMs", "gate/up GEMM", 10.0, 40.0),
        ("all SMs", "down GEMM", 40.0, 45.0),
        ("communication", "combine", 46.0, 53.0),
        ("gemms", "down GEMM", 46.25, 52.25),
        ("all SMs", "combine", 54.0, 57.5),
    ]
    assert step_of(trace(), 3) == [
        {"rank": 3, "lane": lane, "name": name, "start_us": start, "end_us": end}
        for lane, name, start, end in expected
    ]


def test_a_trace_without_a_layer_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match="timeline of rank 1: expected a kernel permutation_of_ranks, got none"
    ):
        step_of(call(1000.0)[:3], 1)


def events() -> list[Event]:
    """Of two ranks."""
    return [event for rank in range(2) for event in step_of(trace(), rank)]


def test_chromes_trace_has_a_process_for_each_rank_and_a_thread_for_each_lane() -> None:
    made = json.loads(json.dumps(chrome_trace(events())))
    entries = made["traceEvents"]
    for entry in entries:
        assert entry["ph"] in ("M", "X")
        assert isinstance(entry["pid"], int)
        assert isinstance(entry["tid"], int)
        assert isinstance(entry["name"], str)
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert threads == {(rank, lane): name for rank in range(2) for lane, name in enumerate(LANES)}
    launches = [entry for entry in entries if entry["ph"] == "X"]
    assert len(launches) == 2 * len(STEP)
    for entry, event in zip(launches, events(), strict=True):
        assert (entry["pid"], threads[entry["pid"], entry["tid"]]) == (event["rank"], event["lane"])
        assert (entry["name"], entry["ts"]) == (event["name"], event["start_us"])
        assert entry["dur"] == pytest.approx(event["end_us"] - event["start_us"])
        assert entry["dur"] >= 0


def row(gpus: int, sms: int, overlapped_us: float) -> overlap.Row:
    times = {"exchange_us": 400.0, "one_gpu_us": 2000.0, "layer_us": 2300.0, "overlapped_us": overlapped_us}
    place = {"layer": "l", "tokens": 4096, "gpus": gpus, "communication_sms": sms, "gemm_sms": 132 - sms}
    return place | times | overlap.exposed(times)


def test_exposed_is_what_one_gpu_does_not_take() -> None:
    assert overlap.exposed(row(2, 16, 2100.0)) == {"exposed_without": 0.75, "exposed": 0.25}


def test_other_rows_stay_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    overlap.write(file, {"ranks": 4}, [row(4, 16, 2300.0), row(4, 24, 2200.0)], {"4": {"events": [1]}})
    overlap.write(file, {"ranks": 2}, [row(2, 24, 2100.0)], {})
    overlap.write(file, {"ranks": 2}, [row(2, 24, 2150.0)], {"2": {"events": [2]}})
    overlap.write(file, {"ranks": 4}, [row(4, 24, 2250.0)], {"4": {"events": [3]}})
    assert json.loads(file.read_text()) == {
        "about": {"ranks": 4},
        "rows": [row(2, 24, 2150.0), row(4, 16, 2300.0), row(4, 24, 2250.0)],
        "timeline": {"2": {"events": [2]}, "4": {"events": [3]}},
    }
    overlap.write(None, {}, [], {})


def problem_of(written: list[float]) -> tuple[Any, Any]:
    """A layer whose calls write these numbers in turn, over what was there if NaN."""
    out = torch.zeros(4, dtype=torch.bfloat16)
    calls = iter(written)

    def layer(_: object) -> None:
        assert out.isnan().all()
        out.nan_to_num_(next(calls))

    return SimpleNamespace(out=out), SimpleNamespace(layer=layer, check=lambda: None)


@pytest.mark.parametrize(
    ("written", "got"),
    [
        ([2.0, 2.0], None),
        ([2.0, 3.0], "4 others of 4; without overlap, 0 NaN"),
        ([0.0, -0.0], "4 others of 4; without overlap, 0 NaN"),
        ([float("nan")] * 2, "0 others of 4; without overlap, 4 NaN"),
    ],
)
def test_other_bits_are_refused(
    written: list[float], got: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    own, problem = problem_of(written)
    ranks: Any = SimpleNamespace(meet=lambda: None, rank=1)
    lanes: Any = SimpleNamespace(communication=SimpleNamespace(num_sms=16))
    if got is None:
        overlap.expect_same_bits(own, problem, ranks, lanes)
        return
    with pytest.raises(RuntimeError, match=f"rank 1, 16 SMs for communication: expected the bits.*got {got}"):
        overlap.expect_same_bits(own, problem, ranks, lanes)


def test_a_row_for_each_number_of_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([400.0, 2300.0, 2000.0, 2200.0, 2100.0])
    layer = SimpleNamespace(name="l")
    own: Any = SimpleNamespace(layer=layer, hidden_states=torch.empty(4096, 1))
    problem = SimpleNamespace(topk_ids=None, exchange=None, layer=lambda overlap: None)
    monkeypatch.setattr(overlap, "rank_problem", lambda own, ranks: (problem, [4096] * 2))
    monkeypatch.setattr(overlap, "all_experts", lambda ids, counts, ranks: [])
    monkeypatch.setattr(overlap, "same_work", lambda own, every, rank: SimpleNamespace(run=None))
    monkeypatch.setattr(overlap, "measure_call", lambda call, problem, ranks: next(times))
    monkeypatch.setattr(overlap, "expect_same_bits", lambda *_: None)
    lanes: list[Any] = [
        SimpleNamespace(communication=SimpleNamespace(num_sms=sms), gemms=SimpleNamespace(num_sms=132 - sms))
        for sms in (16, 24)
    ]
    ranks: Any = SimpleNamespace(count=2, rank=0)
    assert overlap.measure(own, ranks, lanes) == [row(2, 16, 2200.0), row(2, 24, 2100.0)]


def test_the_timeline_is_of_the_fastest_overlap_and_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    def gather(every: list[list[Event]], own: list[Event], group: object) -> None:
        every[:] = [step_of(trace(), 0), own]

    def profiled(call: Callable[[], object], ranks: object) -> list[dict[str, Any]]:
        call()
        return trace()

    problem = SimpleNamespace(layer=called.append, check=lambda: None)
    monkeypatch.setattr(overlap, "make_weights", lambda layer: None)
    monkeypatch.setattr(overlap, "make_problem", lambda layer, weights, num_tokens: num_tokens)
    monkeypatch.setattr(overlap, "rank_problem", lambda own, ranks: (problem, [own] * 2))
    monkeypatch.setattr(overlap, "profiled_kernels", profiled)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    rows = [row(2, 16, 2200.0), row(2, 24, 2100.0), row(2, 32, 2150.0)]
    smaller = [each | {"tokens": 1024, "overlapped_us": 1.0} for each in rows]
    given = overlap.options(["--tokens", "1024", "4096"])
    given.layers = [SimpleNamespace(name="l")]
    ranks: Any = SimpleNamespace(count=2, rank=1, meet=lambda: None, group=None)
    lanes: Any = ["16 SMs", "24 SMs", "32 SMs"]
    step = overlap.timeline(given, ranks, lanes, [*smaller, *rows])
    assert called == ["24 SMs"]
    place = {"layer": "l", "tokens": 4096, "communication_sms": 24, "gemm_sms": 108}
    assert step == place | {"events": events()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "16", "0"], "--tokens: expected numbers of at least 1, got 0"),
        (["--sms", "-8"], "--sms: expected numbers of at least 1, got -8"),
        (["--layer", "gpt"], "--layer: expected a part of deepseek-v3/ep8, .*, got 'gpt'"),
        (["--ranks", "1"], "--ranks: expected 2 to 8, got 1"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        overlap.options(arguments)


def test_without_options_it_measures_deepseeks_layer() -> None:
    given = overlap.options([])
    assert [layer.name for layer in given.layers] == ["deepseek-v3/ep8"]
    assert (given.tokens, given.sms) == ((1024, 4096), (16, 24, 32, 40))


def result(tmp_path: Path) -> Path:
    """Rows of two numbers of GPUs, and a step of each."""
    steps = {
        str(gpus): {"layer": "l", "tokens": 4096, "communication_sms": 24, "gemm_sms": 108, "events": events}
        for gpus, events in ((4, step_of(trace(), 3)), (2, events()))
    }
    rows = [row(4, 24, 2100.0), row(2, 16, 2211.4)]
    overlap.write(tmp_path / "overlap-h200.json", {"gpu": "invented GPU, 1.2, x"}, rows, steps)
    return tmp_path


def test_the_table_has_the_exposed_part_in_percent(tmp_path: Path) -> None:
    assert SECTIONS["parallel-overlap"](tmp_path) == NOT_MEASURED
    assert SECTIONS["parallel-overlap"](result(tmp_path)).splitlines() == [
        "| layer | GPUs | tokens a GPU | SMs for communication | dispatch and combine alone "
        "| one GPU, the same work | whole layer | overlapped | exposed without | exposed |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| l | 2 | 4096 | 16 | 400 | 2000 | 2300 | 2211 | 75% | 53% |",
        "| l | 4 | 4096 | 24 | 400 | 2000 | 2300 | 2100 | 75% | 25% |",
    ]


def test_the_picture_shows_every_launch_on_the_most_gpus(tmp_path: Path) -> None:
    pictures.draw_overlap(result(tmp_path) / "overlap-h200.json", tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    for colour, launches in zip(pictures.LAUNCH_COLOURS.values(), (1, 1, 1, 2, 2), strict=True):
        assert drawn.count(f"fill: {colour}") == launches + 1  # plus one in the legend
    assert re.findall("<!-- (rank .*) -->", drawn) == [f"rank 3, {lane}" for lane in LANES]
    assert (
        "<!-- l, 4096 tokens on each of 4 GPUs (invented GPU): gemms on 108 SMs, communication on 24 -->"
        in drawn
    )


def test_a_picture_without_its_result_is_not_expected(tmp_path: Path) -> None:
    assert "docs/overlap-h200.svg" not in pictures.measured(tmp_path)
    assert list(pictures.measured(result(tmp_path))) == ["docs/overlap-h200.svg"]
