"""Every expression of rules and dashboards, on a real Prometheus that has scraped servers and a caller.

What only a GPU has is asked of series that are made up, in the same Prometheus.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from expertd.service.engine.metrics.table import FAMILIES
from tests.prometheus.processes import (
    Prometheus,
    caller_exporter,
    gpu_exporter,
    needs_prometheus,
    panel_expressions,
    prometheus,
    rules,
    selectors,
)
from tests.service.apps import MODEL, tiny_settings
from tests.service.engine.fake_nvml import fake_nvml
from tests.service.load import Load
from tests.service.processes import server_process
from tests.service.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.thorough, needs_prometheus]
RECORDED = {rule["record"]: rule["expr"] for rule in rules("recording.yml")}
LANES = {"decode_max_tokens": 2, "decode_batch_tokens": 4}


def needs_gpu(expression: str) -> bool:
    """Whether an expression has data only with a series that only servers on GPUs have."""
    return all(_reads_gpu(part) for part in expression.split(" or "))


def _reads_gpu(expression: str) -> bool:
    families = {family.shown_name: family for family in FAMILIES}
    for selector in selectors(expression):
        name = selector.partition("{")[0]
        if name in RECORDED:
            if needs_gpu(RECORDED[name]):
                return True
        elif name in families and families[name].needs_gpu:
            return True
    return False


class Scraped(NamedTuple):
    """Prometheus, and the addresses of what it scrapes: servers, and what is made up."""

    prometheus: Prometheus
    servers: list[str]
    gpu: str


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Prometheus after some seconds of load on three servers."""
    with ExitStack() as stack:
        fake_nvml(stack.enter_context(pytest.MonkeyPatch.context()))
        settings = (
            tiny_settings(lanes=LANES),
            tiny_settings(ranks=2, placement={"policy": "static"}),
            # 6 experts of a rank's 8
            tiny_settings(models=[{**MODEL, "num_experts": 16}], ranks=2, weights_budget=330_000),
        )
        servers = [
            stack.enter_context(server_process(each, tmp_path_factory.mktemp("server"))) for each in settings
        ]
        gpu = stack.enter_context(gpu_exporter())
        caller = stack.enter_context(caller_exporter([f"http://{server.url}" for server in servers[:2]]))
        targets = [*(server.url for server in servers), gpu, caller]
        running = stack.enter_context(prometheus(targets, tmp_path_factory.mktemp("prometheus")))
        stack.enter_context(Load(servers))
        of_all = "count(expertd:request_seconds:p99 > 0)"
        wait_for(lambda: (found := running.query(of_all)) and found[0][1] >= 3, "rules have seen load", 120)
        yield Scraped(running, [server.url for server in servers], gpu)


def check(scraped: Scraped, expression: str) -> None:
    """The expression has a number, from a real server unless it needs a GPU."""
    running, gpu = scraped.prometheus, scraped.gpu
    made_up = needs_gpu(expression)
    asked = expression.replace("$instance", gpu if made_up else "|".join(scraped.servers))

    def number() -> bool:
        return any(
            math.isfinite(value) and (made_up or labels.get("instance") != gpu)
            for labels, value in running.query(asked)
        )

    wait_for(number, f"{expression} has a number")


@pytest.mark.parametrize("name", RECORDED)
def test_recording_rules_have_data(scraped: Scraped, name: str) -> None:
    check(scraped, RECORDED[name])
    check(scraped, name)


@pytest.mark.parametrize("expression", panel_expressions())
def test_panels_have_data(scraped: Scraped, expression: str) -> None:
    check(scraped, expression)


@pytest.mark.parametrize("rule", rules("alerts.yml"), ids=lambda rule: rule["alert"])
def test_alerts_read_series_that_exist(scraped: Scraped, rule: dict[str, str]) -> None:
    scraped.prometheus.query(rule["expr"])
    read = selectors(rule["expr"])
    assert read
    for selector in read:
        check(scraped, selector)


def test_healthy_servers_alert_nobody(scraped: Scraped) -> None:
    """The made-up server has values of every kind, and so alerts."""
    running, gpu = scraped.prometheus, scraped.gpu
    assert running.alerts() <= {rule["alert"] for rule in rules("alerts.yml")}
    for rule in rules("alerts.yml"):
        if rule["alert"] == "ExpertdQueueSlow":
            continue  # where other tests have the cores, queues may be slow
        of_servers = [labels for labels, _ in running.query(rule["expr"]) if labels.get("instance") != gpu]
        assert of_servers == [], rule["alert"]
