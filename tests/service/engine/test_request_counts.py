"""Counts of requests, by model and by the name of a key, in memory that processes share."""

from bisect import bisect_left
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from expertd.layout import Layout
from expertd.service.engine.metrics import Metrics, requests
from expertd.service.engine.metrics.family import SECONDS, HistogramCounts, MetricFamily
from expertd.service.engine.metrics.requests import (
    CELL_BYTES,
    NUM_KEY_CELLS,
    KeyCounts,
    RequestCounts,
    key_metrics,
    num_cells,
    request_metrics,
    request_totals,
)
from expertd.service.engine.metrics.steps import StepSums, Total
from expertd.service.engine.refusals import Reason
from expertd.service.moe.request import StepResult
from expertd.service.moe.shape import LayerShape
from expertd.service.statuses import CONNECTION_REASONS, infer_status

MODELS = ("a", "b")
STATUS_OF = partial(infer_status, queue_full_status=429)


def value(metrics: list[Metric], name: str, **labels: str) -> float | None:
    samples = [sample for metric in metrics for sample in metric.samples]
    return next((one.value for one in samples if (one.name, one.labels) == (f"expertd_{name}", labels)), None)


def test_the_counts_of_all_processes_are_summed_by_model() -> None:
    shared = memoryview(bytearray(2 * num_cells(len(MODELS)) * CELL_BYTES)).cast("d")
    rows = shared[: num_cells(len(MODELS))], shared[num_cells(len(MODELS)) :]
    one, two, own = RequestCounts(MODELS, rows[0]), RequestCounts(MODELS, rows[1]), RequestCounts(MODELS)
    for counts, seconds in ((one, 50e-6), (two, 51e-6), (own, 100.0)):
        counts.request_done("b", None, seconds)
    two.request_done("", "unknown_model", 0.0)
    one.request_done("a", "queue_full", 0.0)
    one.request_done("a", "memory_full", 0.0)
    own.connection_refused("head_too_large")
    successor = RequestCounts(MODELS, rows[0])
    successor.request_done("b", "client_gone", 1.0)
    metrics = list(request_metrics(own.models, [own.cells, *rows], STATUS_OF))
    assert value(metrics, "requests_total", model="b", status="200") == 3
    assert value(metrics, "requests_total", model="b", status="499") == 1
    assert value(metrics, "requests_total", model="a", status="200") == 0
    assert value(metrics, "requests_total", model="a", status="503") == 1, "not 429"
    assert value(metrics, "requests_total", model="a", status="429") == 1
    assert value(metrics, "requests_total", model="", status="404") == 1
    assert value(metrics, "requests_total", model="", status="200") is None, "not served, and never counted"
    assert value(metrics, "refusals_total", model="a", reason="queue_full") == 1
    assert value(metrics, "refusals_total", model="", reason="unknown_model") == 1
    assert value(metrics, "connection_refusals_total", status="431") == 1
    for le, count in (("4e-05", 0), ("8e-05", 2), ("41.94304", 2), ("+Inf", 3)):
        assert value(metrics, "request_seconds_bucket", model="b", le=le) == count
    assert value(metrics, "request_seconds_count", model="b") == 3, "of those with an output"
    assert value(metrics, "request_seconds_sum", model="b") == pytest.approx(100.000101)
    assert value(metrics, "request_seconds_count", model="") is None


def test_successes_and_failures_are_summed_over_the_processes() -> None:
    one, two = RequestCounts(MODELS), RequestCounts(MODELS)
    outcomes: tuple[Reason | None, ...] = (None, "invalid_request", "client_gone", "queue_full")
    for outcome, seconds in zip(outcomes, (0.25, 0.5, 1.0, 2.0), strict=True):
        one.request_done("b", outcome, seconds)
        two.request_done("b", outcome, 2 * seconds)
    totals = request_totals(one.models, [one.cells, two.cells])
    success, failure, refused, by_seconds = totals["b"]
    assert (success, failure) == (Total(2, 750_000_000), Total(6, 10_500_000_000))
    assert refused == {"client_gone": 2, "invalid_request": 2, "queue_full": 2}
    assert sum(by_seconds) == 2
    assert by_seconds[bisect_left(SECONDS, 0.25)] == 1
    assert totals["a"] == (Total(), Total(), {}, [0] * (len(SECONDS) + 1))


def test_steps_are_grouped_by_powers_of_two() -> None:
    sums = StepSums()
    tokens = np.array([1, 2, 3, 4, 5, 8, 9, 4096, 4097])
    sums.add(tokens[:4], np.full(4, 0.5), np.full(4, 2), 4 * 0.75)
    sums.add(tokens[4:], np.full(5, 0.5), np.full(5, 2), 5 * 0.75)
    assert {size: total.count for size, total in sums.by_size.items()} == {
        1: 1,
        2: 1,
        4: 2,
        8: 2,
        16: 1,
        4096: 1,
        8192: 1,
    }
    assert (sums.steps, sums.tokens) == (9, 8225)
    assert sums.queue == Total(18, 9 * 750_000_000)
    assert sums.compute == Total(18, 9 * 1_000_000_000)


def test_every_refusal_of_a_connection_has_a_cell_of_its_own() -> None:
    counts = RequestCounts(MODELS)
    for times, reason in enumerate(CONNECTION_REASONS.values()):
        for _ in range(times):
            counts.connection_refused(reason)
    metrics = list(request_metrics(counts.models, [counts.cells], STATUS_OF))
    for times, status in enumerate(CONNECTION_REASONS):
        assert value(metrics, "connection_refusals_total", status=str(status)) == times
    assert not any(sample.value for metric in metrics[:3] for sample in metric.samples)


def series(*cells: "memoryview[float]") -> dict[tuple[str, str], float]:
    (family,) = key_metrics(cells)
    return {(one.labels["key"], one.labels["result"]): one.value for one in family.samples}


def test_the_counts_of_all_processes_are_summed_by_name() -> None:
    one, two = KeyCounts(), KeyCounts()
    for name in ("a", "b"):
        one.add(name)
    one.admitted("a")
    two.admitted("c" * 64)
    two.admitted("a")
    two.forbidden("b")
    two.unauthorized()
    assert series(one.cells, two.cells) == {
        ("", "unauthorized"): 1,
        ("a", "admitted"): 2,
        ("a", "forbidden"): 0,
        ("b", "admitted"): 0,
        ("b", "forbidden"): 1,
        ("c" * 64, "admitted"): 1,
        ("c" * 64, "forbidden"): 0,
    }


def test_a_process_that_ends_leaves_its_counts_to_its_successor() -> None:
    cells = memoryview(bytearray(8 * NUM_KEY_CELLS)).cast("d")
    first = KeyCounts(cells)
    first.admitted("a")
    first.admitted("b")
    successor = KeyCounts(cells)
    successor.admitted("b")
    successor.admitted("c")
    counts = {name: value for (name, result), value in series(cells).items() if result == "admitted"}
    assert counts == {"a": 1, "b": 2, "c": 1}


def test_names_beyond_the_bound_are_counted_without_one() -> None:
    counts = KeyCounts()
    most = requests._MAX_NAMES - 1
    for number in range(most + 5):
        counts.admitted(str(number))
    found = series(counts.cells)
    assert found["", "admitted"] == 5
    assert len([name for name, result in found if name and result == "admitted"]) == most
    assert found[str(most - 1), "admitted"] == 1


WIDE = LayerShape(256, 128, 8, 2, num_shared_experts=1)


def of_model(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"expertd_{name}", {"model": "a", **labels})
    assert found is not None, name
    return found


@pytest.mark.parametrize("scrape_every", [1, 7, 1000])
def test_many_steps_are_counted_once_each(scrape_every: int) -> None:
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    random = np.random.default_rng(seed)
    metrics = Metrics("0")
    metrics.add_models({"a": WIDE}, 8)
    tokens = random.integers(0, 300, 150)
    seconds = random.lognormal(-8, 2, 150)
    by_expert = random.multinomial(2 * tokens, [0.5, 0.3, 0.1, 0.1, 0, 0, 0, 0])
    waits = [random.exponential(1e-3, random.integers(0, 5)) for _ in range(150)]
    for number in range(150):
        of = int(tokens[number]), partial(by_expert.__getitem__, number), float(seconds[number])
        result = StepResult([], Layout.CONTIGUOUS, *of)
        metrics.step_done("a", result, waits[number].tolist())
        if number % scrape_every == 0:
            of_model(metrics.registry, "tokens_total", layout="contiguous")
    registry = metrics.registry
    assert of_model(registry, "tokens_total", layout="contiguous") == tokens.sum()
    assert of_model(registry, "tokens_total", layout="masked") == 0
    for bound in SECONDS:
        done = of_model(registry, "compute_seconds_bucket", layout="contiguous", le=str(bound))
        assert done == (seconds <= bound).sum()
        waited = sum(int((each <= bound).sum()) for each in waits)
        assert of_model(registry, "queue_seconds_bucket", le=str(bound)) == waited
    assert of_model(registry, "compute_seconds_sum", layout="contiguous") == pytest.approx(seconds.sum())
    assert of_model(registry, "batch_requests_sum") == sum(map(len, waits))
    activated = (by_expert > 0).sum(axis=1)
    assert of_model(registry, "activated_experts_sum") == activated.sum()
    assert of_model(registry, "activated_experts_bucket", le="2.0") == (activated <= 2).sum()
    for expert in range(8):
        assert of_model(registry, "expert_tokens_total", expert=str(expert)) == by_expert[:, expert].sum()
    used = tokens > 0
    ratios = by_expert[used].max(axis=1) * 8 / (2 * tokens[used])
    assert of_model(registry, "load_imbalance_ratio_sum", layout="contiguous") == pytest.approx(ratios.sum())
    pairs = 3 * int(tokens.sum())  # two routed experts and the shared one
    assert of_model(registry, "gemm_flops_total", layout="contiguous") == 6 * 256 * 128 * pairs
    weights = WIDE.expert_bytes * (int(activated.sum()) + int(used.sum()))
    moved = 2 * 2 * 256 * int(tokens.sum())
    assert of_model(registry, "gemm_bytes_total", layout="contiguous") == weights + moved


def test_sums_that_were_read_stay_as_they_are() -> None:
    """Another thread may count steps while they are shown."""
    metrics, reads = Metrics("0"), list[StepSums]()
    metrics.add_models({"a": WIDE}, 8)
    for _ in range(2):
        result = StepResult([], Layout.CONTIGUOUS, 4, lambda: np.ones(8, np.int64), 1e-3)
        metrics.step_done("a", result, [0.5])
        reads += metrics.statistics()["a"].steps, metrics.step_totals()["a"].sums
    half_second, step = 500_000_000, 1_000_000
    for place, read in enumerate(reads):
        steps = place // 2 + 1
        assert (read.steps, read.tokens) == (steps, 4 * steps)
        assert (read.queue, read.compute) == (Total(steps, half_second * steps), Total(steps, step * steps))
        assert read.by_size == {4: Total(steps, step * steps)}


def test_no_step_counts_many_others() -> None:
    """A thread that counts them keeps the thread of the steps waiting."""
    metrics, counted = Metrics("0"), list[int]()
    metrics.add_models({"a": WIDE}, 8)

    def count(number: int) -> NDArray[np.int64]:
        counted.append(number)
        return np.ones(8, np.int64)

    most = 0
    for number in range(1000):
        before = len(counted)
        metrics.step_done("a", StepResult([], Layout.CONTIGUOUS, 4, partial(count, number), 1e-3), [0.0])
        most = max(most, len(counted) - before)
    assert 1 <= most <= 8
    assert len(counted) >= 900
    assert counted == list(range(len(counted)))


def test_loads_are_of_some_steps_together() -> None:
    metrics = Metrics("0")
    metrics.add_models({"a": LayerShape(128, 128, 4, 1)}, 0)
    for tokens in ([4, 0, 0, 0], [0, 4, 0, 0]):
        result = StepResult([], Layout.CONTIGUOUS, 4, partial(np.array, tokens), 1e-3)
        metrics.step_done("a", result, [0.0])
    registry = metrics.registry
    assert of_model(registry, "expert_load_ratio_count") == 4
    assert of_model(registry, "expert_load_ratio_bucket", le="0.0") == 2, "two experts had nothing"
    assert of_model(registry, "expert_load_ratio_bucket", le="1.5") == 2
    assert of_model(registry, "expert_load_ratio_bucket", le="2.0") == 4, "and two had twice the mean"


def test_a_bound_belongs_to_its_bucket() -> None:
    family = MetricFamily("histogram", "test_seconds", "a test", "seconds", buckets=(1.0, 2.0))
    counts, shown = HistogramCounts(family), family.histogram()
    counts.add([0.5, 1.0, 1.5, 2.0, 2.5])
    counts.add([])
    counts.add_to(shown)
    assert [sample.value for sample in shown.samples] == [2, 4, 5, 5, 7.5], "buckets, count, sum"
