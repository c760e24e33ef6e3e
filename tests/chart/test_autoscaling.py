"""What the autoscaler reads, by the rule for prometheus-adapter in docs/kubernetes.md."""

import re
from pathlib import Path
from typing import Any

import yaml

from expertd.service.engine.metrics.steps import QUEUE
from tests.chart.rendering import Helm, one
from tests.paths import ROOT
from tests.prometheus.processes import needs_prometheus, promtool


def adapter_rule() -> dict[str, Any]:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (block,) = [
        found for found in re.findall(r"^```yml\n(.*?)^```$", text, re.M | re.S) if "seriesQuery" in found
    ]
    (rule,) = yaml.safe_load(block)["rules"]
    result: dict[str, Any] = rule
    return result


def test_the_autoscaler_asks_for_what_the_adapter_gives(helm: Helm) -> None:
    objects = helm.render({"insecure": True, "autoscaling": {"enabled": True}})
    (metric,) = one(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == adapter_rule()["name"]["as"]


@needs_prometheus
def test_the_metric_is_the_mean_time_in_the_queue(tmp_path: Path) -> None:
    """Of all layers' requests in the last minute; 0 without any."""
    rule = adapter_rule()
    name = QUEUE.shown_name
    assert rule["seriesQuery"].partition("{")[0] == f"{name}_sum"
    expression = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="moe",pod=~"a|b"')
    expression = expression.replace("<<.GroupBy>>", "pod")
    series = {
        # Seconds and requests, each 15 s.
        ("moe", "a", "m"): ("3+3x8", "5+100x8"),
        ("moe", "a", "n"): ("0+5x8", "0+100x8"),
        ("moe", "b", "m"): ("7x8", "9x8"),
        ("other", "a", "m"): ("0+9x8", "0+1x8"),
    }
    tests = {
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {
                        "series": f'{name}_{of}{{namespace="{space}",pod="{pod}",model="{model}"}}',
                        "values": values,
                    }
                    for (space, pod, model), both in series.items()
                    for of, values in zip(("sum", "count"), both, strict=True)
                ],
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": "2m",
                        "exp_samples": [
                            {"labels": '{pod="a"}', "value": 0.04},
                            {"labels": '{pod="b"}', "value": 0},
                        ],
                    }
                ],
            }
        ]
    }
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in promtool("test", "rules", file)
