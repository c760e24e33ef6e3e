"""`expertd serve`: which layers it serves, and its refusals and warnings."""

import logging
import re
from pathlib import Path

import pytest
import torch

from expertd.service.cli import main
from expertd.service.commands.serve import exposure
from expertd.service.engine.loading import load
from expertd.service.http.listening import is_exposed
from tests.service.apps import MODEL, tiny_settings
from tests.service.processes import EXPERTD, clean_environment, expertd, serving, started
from tests.service.waiting import wait_for

SECOND_NODE = ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"]


@pytest.mark.slow
def test_all_layers_are_served(checkpoint: Path, tmp_path: Path) -> None:
    with serving(["--model", checkpoint, "--layers", "all"], tmp_path) as server:
        served = {
            layer: server.get(f"/v2/models/model.layers.{layer}/ready").status_code for layer in range(4)
        }
    assert served == {0: 404, 1: 200, 2: 200, 3: 404}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "name", "experts"),
    [
        ([], "memory", "0-2"),
        (["--ranks", "2"], "memory, rank 0", "0-1"),
        (["--ranks", "1", *SECOND_NODE], "memory, rank 1", "2"),
    ],
)
def test_what_does_not_fit_in_memory_is_refused_before_the_port_opens(
    config: Path, flags: list[str], name: str, experts: str
) -> None:
    more = ["--set", f"models.0.hidden_size={128 << 30}", "--set", f"limits.max_body_bytes={1 << 60}"]
    result = expertd("serve", "--config", config, *more, *flags)
    assert result.returncode == 2
    assert "listening" not in result.stderr
    held = rf"m: experts {experts} of 3: \d+\.\d GB \(weights \d+\.\d GB, steps \d+\.\d GB\)"
    last = result.stderr.splitlines()[-1]
    assert re.match(rf"expertd: {name}: expected room for {held}, got \d+\.\d \wB free$", last), last


@pytest.mark.gpu
@pytest.mark.parametrize("devices", ["0", "0-1"])
def test_what_does_not_fit_gpus_is_refused_before_the_port_opens(config: Path, devices: str) -> None:
    flags = ["--devices", devices] if devices != "0" else []
    if flags and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    more = ["--set", f"models.0.hidden_size={1 << 20}", "--set", f"models.0.intermediate_size={1 << 20}"]
    more += ["--set", f"limits.max_body_bytes={1 << 40}"]
    result = expertd("serve", "--config", config, "--backend", "hopper", *more, *flags)
    assert result.returncode == 2
    assert "listening" not in result.stderr
    name = "memory, rank 0" if flags else "memory"
    parts = r"weights \d+\.\d GB, steps \d+\.\d GB, graphs .*"
    last = result.stderr.splitlines()[-1]
    expected = rf"expertd: {name}: expected room for m: experts 0-\d of 3: \d+\.\d GB \({parts}\), got "
    assert re.match(expected + r"\d+\.\d GB free$", last), last


@pytest.mark.parametrize("command", ["serve", "check"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--host", "0.0.0.0"],
            "host: expected a loopback address without keys, got 0.0.0.0; give callers keys (--keys), or set "
            "insecure: true (--insecure) if only trusted hosts reach it\n",
        ),
        (
            ["--nnodes", "2", "--rendezvous", "0.0.0.0:29500"],
            "rendezvous: expected a loopback address without keys, got 0.0.0.0:29500; nodes do not "
            "authenticate connections: keep them in a network of their own, and set insecure: true "
            "(--insecure)\n",
        ),
    ],
    ids=["host", "rendezvous"],
)
def test_exposure_without_keys_is_refused(
    command: str, arguments: list[str], expected: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", str(config), "--port", "0", *arguments]) == 2
    assert expected in "".join(capsys.readouterr())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9", "::1", "no such host"])
def test_loopback_is_not_exposed(host: str) -> None:
    assert not is_exposed(host)
    assert exposure(tiny_settings(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_other_addresses_are_reported_as_exposed(host: str) -> None:
    assert is_exposed(host)
    warning = exposure(tiny_settings(host=host, port=8123, insecure=True))
    assert warning is not None
    for word in (
        f"host {host} exposes port 8123",
        "without authentication or TLS",
        "inference",
        "partitions",
    ):
        assert word in warning
    with_keys = exposure(tiny_settings(host=host, port=8123, keys="keys.yaml"))
    assert with_keys is not None
    assert f"host {host} exposes port 8123 beyond this machine without TLS" in with_keys


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_exposed_server_logs_a_warning(host: str, config: Path, tmp_path: Path) -> None:
    def lines() -> list[str] | None:
        text = log.read_text()
        return text.splitlines() if "listening on http://" in text else None

    log = tmp_path / "server.log"
    environment = clean_environment(EXPERTD_HOST=host, EXPERTD_INSECURE="true")
    with log.open("wb") as stderr:
        process = started([EXPERTD, "serve", "--config", config], stderr, environment)
    try:
        logged = wait_for(lines, "the server listens")
    finally:
        process.kill()
        process.wait()
    warnings = [line.partition(": ")[2].rstrip() for line in logged if " WARNING " in line]
    assert warnings == (
        [] if host == "127.0.0.1" else [exposure(tiny_settings(host=host, port=0, insecure=True))]
    )


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("version", "backend", "warns"),
    [("13.0", "auto", True), ("13.0", "reference", False), (None, "auto", False)],
)
def test_a_cuda_installation_that_falls_back_to_a_cpu_warns(
    version: str | None,
    backend: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr("expertd.kernels.backends.cpu.why_slower", lambda: None)
    with caplog.at_level(logging.WARNING):
        load(tiny_settings(backend=backend, models=[MODEL]), lambda: False)
    expected = (
        "backend auto: expected a GPU, because PyTorch is built for CUDA 13.0, got a CPU and backend "
        "'cpu' (hopper: no CUDA device; triton: no CUDA device)"
    )
    assert [record.getMessage() for record in caplog.records] == ([expected] if warns else [])


def test_with_tls_an_exposed_server_is_warned_about_only_without_keys() -> None:
    tls = {"certificate": "a", "key": "b"}
    assert exposure(tiny_settings(host="0.0.0.0", keys="keys.yaml", tls=tls)) is None
    for more, who in (
        ({}, "anyone who can reach it"),
        ({"client_ca": "c"}, "anyone with a client certificate"),
    ):
        warning = exposure(tiny_settings(host="0.0.0.0", insecure=True, tls={**tls, **more}))
        assert f"beyond this machine without keys: {who} can" in str(warning)
