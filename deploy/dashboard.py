"""Writes Grafana's dashboard from configs/grafana/panels.yml: `python -m deploy.dashboard [--check]`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "grafana"
PANELS, DASHBOARD = CONFIGS / "panels.yml", CONFIGS / "dashboards" / "expertd.json"
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8  # Grafana's grid is 24 wide


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model of the dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in yaml.safe_load(PANELS.read_text()):
        panels.append(_panel(len(panels), row["row"], "row", {"x": 0, "y": top, "w": 24, "h": 1}))
        for number, panel in enumerate(row["panels"]):
            line, column = divmod(number, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + 1 + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_graph(len(panels), panel, place))
        top += 1 + -(-len(row["panels"]) // _COLUMNS) * _HEIGHT
    return {
        "uid": "expertd",
        "title": "expertd",
        "schemaVersion": 39,
        "time": {"from": "now-15m", "to": "now"},
        "refresh": "5s",
        "templating": {"list": [_instances()]},
        "panels": panels,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _panel(number: int, title: str, kind: str, place: dict[str, int]) -> dict[str, Any]:
    return {"id": number + 1, "title": title, "type": kind, "gridPos": place}


def _graph(number: int, panel: dict[str, Any], place: dict[str, int]) -> dict[str, Any]:
    is_heat_map = panel.get("heat_map", False)
    targets = [
        {
            "refId": chr(ord("A") + place_of_target),
            "datasource": _SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "format": "heatmap" if is_heat_map else "time_series",
        }
        for place_of_target, (legend, expression) in enumerate(panel["of"].items())
    ]
    stacking = {"mode": "normal" if panel.get("stacked") else "none"}
    custom = {} if is_heat_map else {"stacking": stacking, "fillOpacity": 20 if panel.get("stacked") else 0}
    return {
        **_panel(number, panel["title"], "heatmap" if is_heat_map else "timeseries", place),
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel["unit"], "custom": custom}, "overrides": []},
    }


def _instances() -> dict[str, Any]:
    """The choice of servers; all of them at first."""
    return {
        "name": "instance",
        "label": "server",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(expertd_build_info, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> int:
    """Write the dashboard, or with --check compare; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write Grafana's dashboard from configs/grafana/panels.yml.")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 if it is out of date")
    if not parser.parse_args().check:
        DASHBOARD.write_text(text())
    elif DASHBOARD.read_text() != text():
        print(f"{DASHBOARD}: expected what `python -m deploy.dashboard` writes, got another", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
