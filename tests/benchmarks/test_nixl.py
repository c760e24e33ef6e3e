"""The benchmark of channels over NIXL, with few calls."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.serving import nixl

pytestmark = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="needs the package nixl-cu13")


@pytest.mark.slow
def test_every_way_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "")  # which the benchmark changes
    file = tmp_path / "nixl.json"
    few = ["--rounds", "1", "--seconds", "0.1", "--tokens", "1", "64"]
    assert nixl.main([*few, "--tls", nixl.ON_LOOPBACK[0], "--json", str(file)]) == 0
    one, many = json.loads(file.read_text())["rows"]
    ways = {"bare", "nixl", "http", "channel"}
    assert one.keys() == {"tls", "tokens", *ways, "nixl_per_s", "http_per_s"}
    assert many.keys() == {"tls", "tokens", *ways}
    assert all(row[name] > 0 for row in (one, many) for name in row.keys() - {"tls"})


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="two GPUs are here")
def test_two_gpus_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        nixl.main(["--gpus"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"nixl: expected two GPUs, got {torch.cuda.device_count()}\n"
