"""Writes what each test sent to the file that `FUZZ_JSON` of the environment names, if it names one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.mutations import CASES, SENT
from tests.soak.soaking import commit, cpu_name

TARGETS: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def counted(record_property: Any) -> Iterator[None]:
    before = SENT["cases"]
    yield
    record_property("cases", SENT["cases"] - before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of a test's parts, the call has its time, and what comes last its cases."""
    if not report.nodeid.startswith("tests/fuzz/"):
        return
    target = TARGETS.setdefault(
        report.nodeid.rpartition("::test_")[2], {"cases": 0, "seconds": 0.0, "failures": 0}
    )
    target["cases"] = dict(report.user_properties).get("cases", 0)
    target["seconds"] = round(target["seconds"] + report.duration, 1)
    target["failures"] += report.failed


def pytest_sessionfinish() -> None:
    if file := os.environ.get("FUZZ_JSON"):
        header = {"commit": commit(), "cpu": cpu_name(), "cases": CASES}
        Path(file).write_text(json.dumps({"header": header, "targets": TARGETS}, indent=1) + "\n")
