"""Metrics: every documented one exists, and changes by the right amount."""

import asyncio

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertd.kernels.jit import stats as jit_stats
from expertd.layout import Layout
from expertd.service.engine.refusals import REASONS
from expertd.service.http.app import ExpertApp
from expertd.service.moe.request import StepResult
from expertd.service.statuses import STATUSES
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


async def test_requests_and_steps_are_counted() -> None:
    async with serving(tiny_settings()) as server:
        output_of(await server.infer(*hidden_request(rows(3))))
        output_of(await server.infer(*hidden_request(rows(5))))
        assert (await server.infer(b"{")).status_code == 400
        assert (await server.http.post("/v2/models/nobody/infer")).status_code == 404
        await steps_counted(server, 2)
        samples = await scrape(server)
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
    assert "expertd_device_memory_used_bytes" not in samples, "there is no GPU here"
    assert "expertd_partition_sms" not in samples


async def test_a_batch_of_several_requests_is_counted() -> None:
    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        assert await asyncio.to_thread(runner.entered.acquire, True, 10)
        others = [asyncio.ensure_future(server.infer(*hidden_request(rows(2)))) for _ in range(3)]
        await until(lambda: server.metric("queue_tokens", model="tiny") >= 6)
        runner.gate.set()
        await asyncio.gather(first, *others)
        await until(lambda: server.metric("batch_requests_count", model="tiny") >= 2)
        assert server.metric("batch_requests_sum", model="tiny") == 4
        assert server.metric("batch_tokens_sum", model="tiny", layout="masked") == 7
        assert server.metric("batch_tokens_bucket", model="tiny", layout="masked", le="4.0") == 1
        assert server.metric("load_imbalance_ratio_sum", model="tiny", layout="masked") == 4, (
            "two of four experts"
        )


async def test_a_failed_step_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tiny_settings(), serving_runner(EchoRunner(poison=float(rows(1)[0, 0])))) as server:
        assert (await server.infer(*hidden_request(rows(1)))).status_code == 500
        assert server.metric("step_failures_total", model="tiny") == 1
        assert server.metric("requests_total", model="tiny", status="500") == 1


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


async def test_every_series_exists_during_loading() -> None:
    app = ExpertApp(tiny_settings(), serving_runner(EchoRunner()))
    value = app.metrics.registry.get_sample_value
    assert value("expertd_queue_requests", {"model": "tiny"}) == 0
    assert value("expertd_refusals_total", {"model": "tiny", "reason": "not_ready"}) == 0
    assert value("expertd_expert_tokens_total", {"model": "tiny", "expert": "3"}) == 0


def test_statuses_and_reasons_are_complete() -> None:
    infer = ExpertApp(tiny_settings()).openapi()["paths"]["/v2/models/{model}/infer"]["post"]
    assert set(STATUSES) == set(REASONS)
    assert {str(status) for status in (200, 429, *STATUSES.values())} == {*infer["responses"], "499"}


async def test_openmetrics_is_sent_on_request() -> None:
    async with serving(tiny_settings()) as server:
        headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
        response = await server.http.get("/metrics", headers=headers)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_metrics_are_compressed_if_gzip_is_accepted() -> None:
    async with serving(tiny_settings()) as server:
        packed = await server.http.get("/metrics", headers={"Accept-Encoding": "deflate, gzip;q=0.5"})
        plain = await server.http.get("/metrics", headers={"Accept-Encoding": "identity"})
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


async def test_two_applications_do_not_share_metrics() -> None:
    async with serving(tiny_settings()) as one, serving(tiny_settings()) as other:
        output_of(await one.infer(*hidden_request(rows(1))))
        assert one.metric("requests_total", model="tiny", status="200") == 1
        assert other.metric("requests_total", model="tiny", status="200") == 0


async def test_a_step_without_tokens_has_no_imbalance() -> None:
    async with serving(tiny_settings()) as server:
        empty = StepResult([], Layout.CONTIGUOUS, 0, lambda: np.zeros(NUM_EXPERTS, np.int32), 0.001)
        server.app.metrics.step_done("tiny", empty, [])
        assert server.metric("load_imbalance_ratio_count", model="tiny", layout="contiguous") == 0


async def test_stages_add_up_to_the_time_of_requests_with_an_output() -> None:
    async with serving(tiny_settings()) as server:
        for _ in range(3):
            output_of(await server.infer(*hidden_request(rows(3))))
        assert (await server.infer(b"{")).status_code == 400
        await steps_counted(server, 3)
        samples = await scrape(server)
    stages = {
        dict(labels)["stage"]: value for labels, value in samples["expertd_stage_seconds_total"].items()
    }
    assert set(stages) == {"receive", "queue", "compute", "send"}
    assert all(value > 0 for value in stages.values())
    model, layout = ("model", "tiny"), ("layout", "contiguous")
    assert stages["compute"] == pytest.approx(samples["expertd_compute_seconds_sum"][layout, model])
    assert stages["queue"] == pytest.approx(samples["expertd_queue_seconds_sum"][model,])
    assert sum(stages.values()) == pytest.approx(samples["expertd_request_seconds_sum"][model,])


async def test_steps_copies_and_weights_are_counted() -> None:
    values = rows(3)
    async with serving(tiny_settings()) as server:
        before = await scrape(server)
        output_of(await server.infer(*hidden_request(values)))
        await steps_counted(server, 1)
        after = await scrape(server)
        weights = server.app.engine.loaded.use().weights["tiny"]  # type: ignore[union-attr]
    host = (("launch", "host"), ("model", "tiny"))
    assert after["expertd_steps_total"][host] == before["expertd_steps_total"][host] + 1
    assert sum(after["expertd_steps_total"].values()) == after["expertd_steps_total"][host]
    copied = after["expertd_host_copy_bytes_total"][()] - before["expertd_host_copy_bytes_total"][()]
    assert copied == values.nbytes, "into the step; the output is the step's own"
    assert after["expertd_host_copy_seconds_total"][()] > before["expertd_host_copy_seconds_total"][()]
    num_groups, matrix = NUM_EXPERTS, HIDDEN * 128
    fp8 = 3 * num_groups * (matrix + 4)  # e4m3, and a scale for each block of 128 x 128
    assert after["expertd_weights_bytes"] == {(("model", "tiny"),): weights}
    assert weights in (fp8 + 4 * NUM_EXPERTS * HIDDEN, fp8 + 2 * NUM_EXPERTS * HIDDEN)
    assert "expertd_device_memory_bytes" not in after
