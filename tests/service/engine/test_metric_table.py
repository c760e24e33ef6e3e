"""The table of metrics is held to what servers report: names, types, labels, meanings."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.family import MetricFamily
from expertd.service.engine.metrics.table import FAMILIES, replaced
from expertd.service.engine.refusals import REASONS
from tests.paths import ROOT
from tests.service.apps import serving, tiny_settings
from tests.service.engine.all_metrics import SHAPE, everything
from tests.service.engine.fake_nvml import fake_nvml

DOCUMENT = ROOT / "docs" / "monitoring.md"
_BASE_UNITS = ("seconds", "bytes", "ratio", "watts", "joules", "hertz", "celsius", "tokens")


def own(registry: CollectorRegistry) -> Iterator[Metric]:
    return (metric for metric in registry.collect() if metric.name.startswith("expertd_"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)


def check(metric: Metric, family: MetricFamily) -> None:
    assert (metric.name, metric.type, metric.documentation) == (family.full_name, family.kind, family.text)
    for sample in metric.samples:
        assert set(sample.labels) - {"le"} == set(family.labels), sample.name


def test_the_table_has_every_metric_and_no_other() -> None:
    found = {metric.name: metric for metric in own(everything().registry)}
    assert set(found) == {family.full_name for family in FAMILIES}
    for family in FAMILIES:
        assert found[family.full_name].samples, family.name
        check(found[family.full_name], family)


@pytest.mark.parametrize("changes", [{}, {"lanes": {"decode_max_tokens": 2, "decode_batch_tokens": 4}}])
async def test_a_server_reports_what_the_table_says(changes: dict[str, Any]) -> None:
    families = {family.full_name: family for family in FAMILIES}
    always = {family.full_name for family in FAMILIES if not family.when}
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


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing() -> None:
    text = generate_latest(everything().registry)
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
