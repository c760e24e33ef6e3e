"""The rules and the dashboard as files: promtool accepts them, every alert is tested and documented."""

import re
from pathlib import Path

import pytest
import yaml

from deploy import dashboard
from expertd.service.engine.metrics.table import FAMILIES
from expertd_client.metrics import FAMILIES as POOL_FAMILIES
from expertd_client.outcomes import OUTCOMES
from tests.paths import ROOT
from tests.prometheus.processes import (
    CONFIGS,
    needs_prometheus,
    panel_expressions,
    promtool,
    rules,
    selectors,
)

TESTS = Path(__file__).with_name("alerts.test.yml")
ALERTS = [rule["alert"] for rule in rules("alerts.yml")]


@needs_prometheus
def test_promtool_accepts_the_configuration() -> None:
    promtool("check", "config", CONFIGS / "prometheus.yml")


@needs_prometheus
@pytest.mark.thorough
def test_rules_give_what_their_tests_expect() -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS)


def test_every_alert_is_tested_both_ways() -> None:
    cases = [
        case
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
    ]
    for is_firing in (True, False):
        assert {case["alertname"] for case in cases if bool(case.get("exp_alerts")) == is_firing} == set(
            ALERTS
        )


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    (alerts,) = re.findall(r"^## Alerts$(.*?)(?=^## |\Z)", text, re.M | re.S)
    sections = dict(re.findall(r"^### (\w+)\n\n(.*?)\s*(?=^### |\Z)", alerts, re.M | re.S))
    assert list(sections) == ALERTS
    words = {"critical": "Critical.", "warning": "Warning.", "info": "Information."}
    for rule in rules("alerts.yml"):
        paragraphs = sections[rule["alert"]].split("\n\n")
        assert paragraphs[0].startswith(words[rule["labels"]["severity"]]), rule["alert"]
        assert len(paragraphs) > 1, f"{rule['alert']}: expected a paragraph on what to do"
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{rule['alert'].lower()}"


def test_expressions_read_known_series() -> None:
    names = {family.shown_name for family in FAMILIES} | {rule["record"] for rule in rules("recording.yml")}
    names |= {family.shown_name for family in POOL_FAMILIES} | {
        "up",
        "process_start_time_seconds",
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
    }
    expressions = [rule["expr"] for file in ("recording.yml", "alerts.yml") for rule in rules(file)]
    for expression in (*expressions, *panel_expressions()):
        read = selectors(expression)
        assert read, expression
        for selector in read:
            name = re.sub(r"_(bucket|sum|count)$", "", selector.partition("{")[0])
            assert name in names, expression


def test_the_metrics_of_pools_are_documented() -> None:
    text = (ROOT / "docs" / "pool.md").read_text()
    rows = re.findall(r"^\| `(expertd_pool_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", text, re.M)
    assert rows == [
        (family.shown_name, family.kind, ", ".join(family.labels), family.text) for family in POOL_FAMILIES
    ]
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \|$", text.partition("| outcome |")[2], re.M) == list(
        OUTCOMES
    )


def test_the_dashboard_is_what_its_panels_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dashboard.DASHBOARD.read_text() == dashboard.text(), "run python -m deploy.dashboard"
    panels = dashboard.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)
    monkeypatch.setattr("sys.argv", ["dashboard", "--check"])
    assert dashboard.main() == 0


def test_provisioning_finds_source_and_dashboard() -> None:
    provisioning = ROOT / "configs" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    targets = [target for panel in dashboard.dashboard()["panels"] for target in panel.get("targets", [])]
    assert {target["datasource"]["uid"] for target in targets} == {source["uid"]}
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "expertd.yml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"] if volume.startswith("."))
    assert mounts["./configs/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./configs/grafana/provisioning"] == "/etc/grafana/provisioning"
