"""What steps add to metrics: compared with counts by hand, whatever the number of steps and of scrapes."""

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from expertd.layout import Layout
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.family import SECONDS, HistogramCounts, MetricFamily
from expertd.service.engine.metrics.steps import StepSums, Total
from expertd.service.moe.request import StepResult
from expertd.service.moe.shape import LayerShape

SHAPE = LayerShape(256, 128, 8, 2, num_shared_experts=1)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"expertd_{name}", {"model": "a", **labels})
    assert found is not None, name
    return found


@pytest.mark.parametrize("scrape_every", [1, 7, 1000])
def test_many_steps_are_counted_once_each(scrape_every: int) -> None:
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    random = np.random.default_rng(seed)
    metrics = Metrics("0")
    metrics.add_models({"a": SHAPE}, 8)
    tokens = random.integers(0, 300, 150)
    seconds = random.lognormal(-8, 2, 150)
    by_expert = random.multinomial(2 * tokens, [0.5, 0.3, 0.1, 0.1, 0, 0, 0, 0])
    waits = [random.exponential(1e-3, random.integers(0, 5)) for _ in range(150)]
    for number in range(150):
        of = int(tokens[number]), partial(by_expert.__getitem__, number), float(seconds[number])
        result = StepResult([], Layout.CONTIGUOUS, *of)
        metrics.step_done("a", result, waits[number].tolist())
        if number % scrape_every == 0:
            value(metrics.registry, "tokens_total", layout="contiguous")
    registry = metrics.registry
    assert value(registry, "tokens_total", layout="contiguous") == tokens.sum()
    assert value(registry, "tokens_total", layout="masked") == 0
    for bound in SECONDS:
        done = value(registry, "compute_seconds_bucket", layout="contiguous", le=str(bound))
        assert done == (seconds <= bound).sum()
        waited = sum(int((each <= bound).sum()) for each in waits)
        assert value(registry, "queue_seconds_bucket", le=str(bound)) == waited
    assert value(registry, "compute_seconds_sum", layout="contiguous") == pytest.approx(seconds.sum())
    assert value(registry, "batch_requests_sum") == sum(map(len, waits))
    activated = (by_expert > 0).sum(axis=1)
    assert value(registry, "activated_experts_sum") == activated.sum()
    assert value(registry, "activated_experts_bucket", le="2.0") == (activated <= 2).sum()
    for expert in range(8):
        assert value(registry, "expert_tokens_total", expert=str(expert)) == by_expert[:, expert].sum()
    used = tokens > 0
    ratios = by_expert[used].max(axis=1) * 8 / (2 * tokens[used])
    assert value(registry, "load_imbalance_ratio_sum", layout="contiguous") == pytest.approx(ratios.sum())
    pairs = 3 * int(tokens.sum())  # two routed experts and the shared one
    assert value(registry, "gemm_flops_total", layout="contiguous") == 6 * 256 * 128 * pairs
    weights = SHAPE.expert_bytes * (int(activated.sum()) + int(used.sum()))
    moved = 2 * 2 * 256 * int(tokens.sum())
    assert value(registry, "gemm_bytes_total", layout="contiguous") == weights + moved


def test_sums_that_were_read_stay_as_they_are() -> None:
    """Another thread may count steps while they are shown."""
    metrics, reads = Metrics("0"), list[StepSums]()
    metrics.add_models({"a": SHAPE}, 8)
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
    metrics.add_models({"a": SHAPE}, 8)

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
    assert value(registry, "expert_load_ratio_count") == 4
    assert value(registry, "expert_load_ratio_bucket", le="0.0") == 2, "two experts had nothing"
    assert value(registry, "expert_load_ratio_bucket", le="1.5") == 2
    assert value(registry, "expert_load_ratio_bucket", le="2.0") == 4, "and two had twice the mean"


def test_a_bound_belongs_to_its_bucket() -> None:
    family = MetricFamily("histogram", "test_seconds", "a test", "seconds", buckets=(1.0, 2.0))
    counts, shown = HistogramCounts(family), family.histogram()
    counts.add([0.5, 1.0, 1.5, 2.0, 2.5])
    counts.add([])
    counts.add_to(shown)
    assert [sample.value for sample in shown.samples] == [2, 4, 5, 5, 7.5], "buckets, count, sum"
