"""Metrics: every documented one exists, and changes by the right amount."""

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from expertd.device_calls import CallCounts
from expertd.kernels.jit import stats as jit_stats
from expertd.service.engine.calls import CallServer
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.family import MetricFamily
from expertd.service.engine.metrics.table import FAMILIES, replaced
from expertd.service.engine.refusals import REASONS
from expertd.service.http.app import ExpertApp
from expertd.service.statuses import STATUSES
from tests.paths import ROOT
from tests.service.apps import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    Serving,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.engine.all_metrics import SHAPE, everything
from tests.service.engine.fake_nvml import fake_nvml
from tests.service.runners import EchoRunner
from tests.service.waiting import until


async def scrape(server: Serving) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels, as Prometheus parses them."""
    response = await server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


async def steps_counted(server: Serving, steps: int) -> None:
    """Wait until `steps` steps are counted, which may be after their answers are delivered."""
    await until(lambda: server.metric("compute_seconds_count", model="tiny", layout="contiguous") >= steps)


async def test_requests_steps_copies_and_weights_are_counted() -> None:
    async with serving(tiny_settings()) as server:
        before = await scrape(server)  # loading runs steps, too
        output_of(await server.infer(*hidden_request(rows(3))))
        output_of(await server.infer(*hidden_request(rows(5))))
        assert (await server.infer(b"{")).status_code == 400
        assert (await server.http.post("/v2/models/nobody/infer")).status_code == 404
        await steps_counted(server, 2)
        samples = await scrape(server)
        weights = server.app.engine.loaded.use().weights["tiny"]  # type: ignore[union-attr]
    assert {labels: value for labels, value in samples["expertd_requests_total"].items() if value} == {
        (("model", "tiny"), ("status", "200")): 2,
        (("model", "tiny"), ("status", "400")): 1,
        (("model", ""), ("status", "404")): 1,
    }
    assert {labels: value for labels, value in samples["expertd_refusals_total"].items() if value} == {
        (("model", "tiny"), ("reason", "invalid_request")): 1,
        (("model", ""), ("reason", "unknown_model")): 1,
    }
    model, layout = ("model", "tiny"), ("layout", "contiguous")
    assert samples["expertd_request_seconds_count"][model,] == 2, "of those with an output"
    assert samples["expertd_queue_seconds_count"][model,] == 2
    assert samples["expertd_compute_seconds_count"][layout, model] == 2
    assert (
        0
        < samples["expertd_compute_seconds_sum"][layout, model]
        < samples["expertd_request_seconds_sum"][model,]
    )
    assert samples["expertd_tokens_total"][layout, model] == 8
    assert samples["expertd_batch_tokens_sum"][layout, model] == 8
    assert samples["expertd_batch_tokens_count"][layout, model] == 2
    assert samples["expertd_batch_requests_sum"][model,] == 2
    by_expert = samples["expertd_expert_tokens_total"]
    assert set(by_expert) == {(("expert", str(i)), model) for i in range(NUM_EXPERTS)}
    assert sum(by_expert.values()) == 8 * TOP_K
    assert samples["expertd_load_imbalance_ratio_count"][layout, model] == 2
    assert 2 <= samples["expertd_load_imbalance_ratio_sum"][layout, model] <= 2 * NUM_EXPERTS / TOP_K
    assert samples["expertd_queue_requests"] == samples["expertd_queue_tokens"] == {(model,): 0}
    build = dict(next(iter(samples["expertd_build_info"])))
    assert build["backend"] == "reference"
    assert build["device"].startswith("cpu")
    assert samples["process_resident_memory_bytes"][()] > 0
    for name, value in jit_stats()._asdict().items():  # of the process, so other tests may have compiled
        assert samples[f"expertd_jit_{name}_total"] == {(): value}
    assert samples["expertd_model_ready"] == {(model,): 1}
    stages = {
        dict(labels)["stage"]: value for labels, value in samples["expertd_stage_seconds_total"].items()
    }
    assert set(stages) == {"receive", "queue", "compute", "send"}
    assert all(value > 0 for value in stages.values())
    assert stages["compute"] == pytest.approx(samples["expertd_compute_seconds_sum"][layout, model])
    assert stages["queue"] == pytest.approx(samples["expertd_queue_seconds_sum"][model,])
    assert sum(stages.values()) == pytest.approx(samples["expertd_request_seconds_sum"][model,])
    host = (("launch", "host"), model)
    assert samples["expertd_steps_total"][host] == before["expertd_steps_total"][host] + 2
    assert sum(samples["expertd_steps_total"].values()) == samples["expertd_steps_total"][host]
    copied = samples["expertd_host_copy_bytes_total"][()] - before["expertd_host_copy_bytes_total"][()]
    assert copied == 8 * 4 * HIDDEN, "into the steps; the outputs are the steps' own"
    assert samples["expertd_host_copy_seconds_total"][()] > 0
    fp8 = 3 * NUM_EXPERTS * (HIDDEN * 128 + 4)  # e4m3, and a scale for each block of 128 x 128
    assert samples["expertd_weights_bytes"] == {(model,): weights}
    assert weights in (fp8 + 4 * NUM_EXPERTS * HIDDEN, fp8 + 2 * NUM_EXPERTS * HIDDEN)
    assert "expertd_device_memory_used_bytes" not in samples, "there is no GPU here"
    assert "expertd_device_memory_bytes" not in samples
    assert "expertd_partition_sms" not in samples


async def test_every_series_exists_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    poison = float(rows(1, seed=1)[0, 0])
    async with serving(tiny_settings(), serving_runner(EchoRunner(poison))) as server:
        first = await scrape(server)
        output_of(await server.infer(*hidden_request(rows(3))))
        await server.infer(*hidden_request(rows(1, seed=1)))
        await server.infer(b"", content_encoding="br")
        await server.http.post("/v2/models/nobody/infer")
        await until(lambda: server.metric("batch_requests_count", model="tiny") > 0)
        last = await scrape(server)
    assert {name: set(series) for name, series in first.items()} == {
        name: set(series) for name, series in last.items() if name != "expertd_build_info"
    } | {"expertd_build_info": set(first["expertd_build_info"])}
    model = ("model", "tiny")
    assert first["expertd_step_failures_total"] == {(model,): 0}
    assert last["expertd_step_failures_total"] == {(model,): 1}
    assert set(first["expertd_refusals_total"]) == {
        *((model, ("reason", reason)) for reason in REASONS),
        (("model", ""), ("reason", "unknown_model")),
    }
    assert set(first["expertd_requests_total"]) == {
        *((model, ("status", str(status))) for status in (200, *STATUSES.values())),
        (("model", ""), ("status", "404")),
    }


async def test_device_calls_are_read_at_each_scrape() -> None:
    """From 0 on, by model; and of a server without them there are none."""
    counts: dict[str, CallCounts] = {}
    async with serving(tiny_settings()) as server:
        without = set(await scrape(server))
        engine = server.app.engine
        assert engine.loaded is not None
        calls = cast(CallServer, SimpleNamespace(counts=lambda: counts))
        engine.loaded = dataclasses.replace(engine.loaded, calls=calls)
        scrapes = [await scrape(server)]
        for counts["tiny"] in CallCounts(3, 17, 2, 0.25), CallCounts(5, 18, 3, 0.5):
            scrapes.append(await scrape(server))
    names = [f"expertd_device_call{name}_total" for name in ("s", "_tokens", "_steps", "_seconds")]
    assert set(scrapes[0]) - without == set(names)
    assert [[each[name] for name in names] for each in scrapes] == [
        [{(("model", "tiny"),): value} for value in values]
        for values in ((0, 0, 0, 0), (3, 17, 2, 0.25), (5, 18, 3, 0.5))
    ]


def test_statuses_and_reasons_are_complete() -> None:
    infer = ExpertApp(tiny_settings()).openapi()["paths"]["/v2/models/{model}/infer"]["post"]
    assert set(STATUSES) == set(REASONS)
    assert {str(status) for status in (200, 429, *STATUSES.values())} == {*infer["responses"], "499"}


async def test_openmetrics_and_gzip_are_sent_on_request() -> None:
    async with serving(tiny_settings()) as server:
        accept = "application/openmetrics-text; version=1.0.0"
        opened, packed, plain = [
            await server.http.get("/metrics", headers={"Accept-Encoding": "identity", **headers})
            for headers in ({"Accept": accept}, {"Accept-Encoding": "deflate, gzip;q=0.5"}, {})
        ]
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 4
    assert "content-encoding" not in plain.headers
    assert "accept-encoding" in plain.headers["vary"].lower()
    names = [
        {line for line in response.text.splitlines() if line.startswith("# TYPE expertd_")}
        for response in (packed, plain)
    ]
    assert names[0] == names[1]
    assert len(names[0]) > 10


DOCUMENT = ROOT / "docs" / "monitoring.md"
_BASE_UNITS = ("seconds", "bytes", "ratio", "watts", "joules", "hertz", "celsius", "tokens")


def own(registry: CollectorRegistry) -> Iterator[Metric]:
    return (metric for metric in registry.collect() if metric.name.startswith("expertd_"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)


def check(metric: Metric, family: MetricFamily) -> None:
    assert (metric.name, metric.type, metric.documentation) == (family.full_name, family.kind, family.text)
    for sample in metric.samples:
        assert set(sample.labels) - {"le"} == set(family.labels), sample.name


@pytest.mark.usefixtures("gpu")
def test_the_table_has_every_metric_and_no_other() -> None:
    found = {metric.name: metric for metric in own(everything().registry)}
    assert set(found) == {family.full_name for family in FAMILIES}
    for family in FAMILIES:
        assert found[family.full_name].samples, family.name
        check(found[family.full_name], family)


@pytest.mark.parametrize("changes", [{}, {"lanes": {"decode_max_tokens": 2, "decode_batch_tokens": 4}}])
async def test_a_server_reports_what_the_table_says(changes: dict[str, Any]) -> None:
    families = {family.full_name: family for family in FAMILIES}
    always = {family.full_name for family in FAMILIES if not family.where}
    async with serving(tiny_settings(**changes)) as server:
        found = list(own(server.app.metrics.registry))
    for metric in found:
        check(metric, families[metric.name])
    assert always <= {metric.name for metric in found}


def test_names_are_those_of_one_family_with_its_unit() -> None:
    assert len({family.full_name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        for unit in _BASE_UNITS:
            ends = family.name.endswith(f"_{unit}") or family.name == unit
            assert ends == (family.unit == unit), f"{family.name} in {family.unit}"
        assert bool(family.buckets) == (family.kind == "histogram"), family.name


def test_the_document_has_the_table_and_the_values_of_labels() -> None:
    text = DOCUMENT.read_text()
    assert replaced(text) == text, "python -m expertd.service.engine.metrics.table docs/monitoring.md"
    for reason in REASONS:
        assert f"`{reason}`" in text, reason
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| ", text.partition("## Number of series")[2].partition("\n## ")[0], re.M
    )
    bounded = {label for row in rows for label in re.findall(r"\w+", row)}
    assert bounded == {label for family in FAMILIES for label in family.labels}


@pytest.mark.parametrize(("most", "is_there"), [(3, False), (4, True)])
def test_experts_have_series_up_to_the_limit(most: int, is_there: bool) -> None:
    metrics = Metrics("0")
    metrics.add_models({"tiny": SHAPE}, most)
    names = {metric.name for metric in own(metrics.registry)}
    assert ("expertd_expert_tokens" in names) == is_there
    assert "expertd_expert_load_ratio" in names


@pytest.mark.usefixtures("gpu")
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing() -> None:
    text = generate_latest(everything().registry)
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
