"""`expertd check`, `expertd layers`, and the warnings of `serve` about its address and its device."""

import json
import logging
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from expertd.service.checkpoints import CheckpointError, models_of
from expertd.service.cli import main
from expertd.service.commands.serve import exposure
from expertd.service.engine.loading import load
from expertd.service.http.listening import is_exposed
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.ranks import shares
from expertd.service.settings.served import CheckpointSettings
from tests.paths import ROOT
from tests.service.apps import MODEL, tiny_settings
from tests.service.certificates import FOLDER
from tests.service.checkpoints.builders import Checkpoint, edit_json
from tests.service.moe.test_weights import SHAPE
from tests.service.processes import EXPERTD, clean_environment, expertd, serving

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTD_CONFIG", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and no backend resolved yet."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("expertd.kernels.backends._instances", {})
    monkeypatch.setattr("expertd.kernels.backends._auto_choices", {})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpoint("deepseek-v3", tmp_path_factory.mktemp("made") / "model", torch.float32).directory


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    model = {"name": "m", "hidden_size": 256, "intermediate_size": 128, "num_experts": 3, "top_k": 2}
    path.write_text(yaml.safe_dump({"port": 0, "backend": "reference", "models": [model]}))
    return path


def check(capsys: Output, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = main(["check", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def failed(about: dict[str, Any]) -> dict[str, str]:
    return {result["name"]: result["detail"] for result in about["checks"] if not result["ok"]}


def test_check_prints_what_each_rank_holds(
    checkpoint: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        "--port",
        "0",
        "--backend",
        "reference",
        "--model",
        checkpoint,
        "--layers",
        "all",
        "--ranks",
        "2",
    )
    code, about = check(capsys, *arguments)
    assert (code, failed(about)) == (0, {})
    first, second = (
        result["detail"] for result in about["checks"] if result["name"].startswith("memory, rank ")
    )
    assert first.startswith("model.layers.1-2: experts 0-3 of 8 and 1 shared: ")
    assert second.startswith("model.layers.1-2: experts 4-7 of 8 and 1 shared: ")
    monkeypatch.setattr(shares, "free_host_bytes", lambda: 3_000_000)
    code, about = check(capsys, *arguments)
    assert code == 2
    wrong = failed(about)
    assert wrong.keys() == {"memory, rank 0", "memory, rank 1"}
    assert all(detail.endswith("; 1.5 MB are free") for detail in wrong.values())


def test_check_plans_for_gpus_that_are_not_here(checkpoint: Path, capsys: Output) -> None:
    arguments = (
        "--port",
        "0",
        "--backend",
        "hopper",
        "--model",
        checkpoint,
        "--layers",
        "all",
        "--devices",
        "0-3",
    )
    _, about = check(capsys, *arguments)
    details = [result["detail"] for result in about["checks"] if result["name"].startswith("memory, rank ")]
    assert len(details) == 4
    assert "experts 6-7 of 8 and 1 shared: " in details[3]
    assert ", graphs " in details[3]
    assert ", exchange " in details[3]


def test_check_prints_every_setting_with_its_origin(
    config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERTD_LIMITS__MAX_QUEUE_TOKENS", "7000")
    code, about = check(
        capsys, "--config", config, "--log-level", "INFO", "--set", "limits.max_json_bytes=99"
    )
    assert (code, about["would_start"], failed(about)) == (0, True, {})
    rows = {row["key"]: (row["value"], row["origin"]) for row in about["settings"]}
    assert rows["log_level"] == ("info", "flag --log-level")
    assert rows["limits.max_queue_tokens"] == (7000, "environment variable EXPERTD_LIMITS__MAX_QUEUE_TOKENS")
    assert rows["limits.max_json_bytes"] == (99, "flag --set limits.max_json_bytes")
    assert rows["models.0.top_k"][0] == 2
    line = int(rows["models.0.top_k"][1].removeprefix(f"{config}:"))
    assert config.read_text().splitlines()[line - 1].split() == ["top_k:", "2"]
    assert rows["host"] == ("127.0.0.1", "default")
    assert [result["name"] for result in about["checks"]] == [
        "settings", "checkpoints", "weights", "keys", "tls", "address", "grpc", "rendezvous", "channels",
        "backend",
        "partitions",
        "memory",
    ]  # fmt: skip


def test_check_as_a_table(config: Path, capsys: Output) -> None:
    assert main(["check", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^port +0 +{re.escape(str(config))}:\d+$", out, re.M)
    assert re.search(r"^backend +ok +reference on cpu$", out, re.M)
    assert main(["check", "--config", str(config), "--set", "port=x"]) == 2
    captured = capsys.readouterr()
    assert re.search(r"^settings +error +flag --set port: port: expected a valid integer", captured.out, re.M)
    assert captured.err == "expertd check: the server would not start\n"


def test_every_wrong_setting_is_reported(config: Path, capsys: Output) -> None:
    arguments = ["--config", str(config), "--set", "port=x", "--set", "host=", "--set", "colour=red"]
    assert main(["serve", *arguments]) == 2
    mistakes = re.findall(
        r"^expertd: flag --set (\w+): \1: expected .*, got .*\n", capsys.readouterr().err, re.M
    )
    assert mistakes == ["colour", "host", "port"]
    assert main(["check", *arguments]) == 2
    out = capsys.readouterr().out
    assert re.findall(r"^settings +error +flag --set (\w+): \1: expected .*, got ", out, re.M) == mistakes
    code, about = check(capsys, *arguments)
    assert code == 2
    assert [result["detail"].split(": ")[1] for result in about["checks"]] == mistakes


def test_check_reports_what_would_prevent_a_start(config: Path, capsys: Output, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, about = check(capsys, "--config", config, "--port", str(port))
    assert code == 2
    assert failed(about) == {
        "address": f"port: expected a free address, got 127.0.0.1:{port}: Address already in use"
    }
    path = tmp_path / "channels"
    _, about = check(capsys, "--config", config, "--port", "0", "--set", f"channels.socket={path}")
    assert failed(about) == {}
    assert not path.exists(), "it leaves nothing behind"
    path.mkdir()
    _, about = check(capsys, "--config", config, "--port", "0", "--set", f"channels.socket={path}")
    text = f"channels.socket: expected a free path or a socket, got {path}, which is another file"
    assert failed(about) == {"channels": text}
    _, about = check(capsys, "--config", config, "--set", "partitions={p: 8}")
    assert failed(about)["partitions"].startswith("partitions: expected a backend whose device has SMs")
    _, about = check(capsys, "--model", tmp_path, "--layers", "all", "--port", "0")
    assert failed(about) == {
        "checkpoints": f"{tmp_path}/config.json: cannot be read: No such file or directory"
    }
    _, about = check(capsys)
    assert failed(about).keys() == {"settings"}
    assert about["settings"] == []


@pytest.mark.usefixtures("no_gpu")
def test_check_looks_at_the_rendezvous(config: Path, capsys: Output) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        given = ("--config", config, "--port", "0", "--nnodes", "2", "--rendezvous", place)
        code, about = check(capsys, *given)
        assert (code, list(failed(about))) == (2, ["rendezvous"])
        assert f"rendezvous: expected a free port on an address of node 0, got {place}" in str(failed(about))
        code, about = check(capsys, *given, "--node-rank", "1")
        details = {result["name"]: result["detail"] for result in about["checks"]}
        assert (code, details["rendezvous"]) == (0, f"{place}, from 127.0.0.1 on lo")
        assert details["address"] == "none: node 0 has the front end"
    assert check(capsys, *given)[0] == 0


@pytest.mark.usefixtures("no_gpu")
def test_check_refuses_a_rendezvous_where_the_server_listens(config: Path, capsys: Output) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = f"127.0.0.1:{port}"
    for host in ("localhost", "127.0.0.1", "0.0.0.0"):
        given = (
            "--config",
            config,
            "--insecure",
            "--host",
            host,
            "--port",
            str(port),
            "--nnodes",
            "2",
            "--rendezvous",
        )
        code, about = check(capsys, *given, place)
        expected = f"another port than the server's own, {host}:{port}"
        assert code == 2
        assert failed(about) == {"rendezvous": f"rendezvous: expected {expected}, got {place}"}
        assert check(capsys, *given, place, "--node-rank", "1")[0] == 0, "there is no server"
    given = ("--config", config, "--insecure", "--host", "127.0.0.1", "--port", str(port), *given[-3:])
    assert check(capsys, *given, f"127.0.0.2:{port}")[0] == 0, "another address"


def test_check_reports_a_backend_that_cannot_run(config: Path, capsys: Output) -> None:
    code, about = check(capsys, "--config", config, "--backend", "hopper")
    assert code == 2
    assert "no CUDA device" in failed(about)["backend"]


def test_check_reads_the_headers_of_weights(config: Path, capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    given = ("--config", config, "--set", f"models.0.weights={{path: {path}}}")
    save_weights(path, random_weights(SHAPE, 0, "cpu"))
    assert check(capsys, *given)[0] == 0
    save_file({"other": torch.zeros(1)} | load_file(path), path)
    code, about = check(capsys, *given)
    assert code == 2
    assert failed(about)["weights"].endswith("got 1 unknown: other")


def test_serve_refuses_a_weights_file_before_it_listens(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    result = expertd("serve", "--config", config, "--set", f"models.0.weights={{path: {path}}}")
    assert result.returncode == 2
    assert result.stderr == f"expertd: {path}: cannot be read: No such file or directory\n"


def test_layers_lists_the_layers_of_a_checkpoint(checkpoint: Path, capsys: Output) -> None:
    assert main(["layers", "--json", str(checkpoint)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["family"], about["hidden_size"], about["intermediate_size"]) == ("deepseek_v3", 256, 128)
    assert (about["num_experts"], about["num_shared_experts"], about["top_k"]) == (8, 1, 3)
    num_bytes = (8 + 1) * 3 * 256 * 128
    assert about["layers"] == [
        {"layer": layer, "format": "FP8, a scale per 128x128", "num_bytes": num_bytes} for layer in (1, 2)
    ], "3 is for multi-token prediction, and the checkpoint leaves it out"
    assert main(["layers", str(checkpoint)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{checkpoint}: deepseek_v3, 2 MoE layers",
        "hidden_size 256, intermediate_size 128, num_experts 8, num_shared_experts 1, top_k 3",
        "routing: scoring_func sigmoid, renormalize True, routed_scaling_factor 2.5, num_expert_groups 4, "
        "topk_group 2, with a bias",
        "experts: down(silu(gate) * up)",
        "layers  weights                   bytes a layer",
        f"1-2     FP8, a scale per 128x128        {num_bytes:,}",
    ]


@pytest.mark.parametrize(
    ("family", "lines"),
    [
        ("qwen2", ["experts: down(silu(gate) * up), the shared one with a gate"]),
        (
            "hunyuan-4",
            ["experts: down(silu(min(gate, 0.7)) * clamp(up, 0.7)), shared ones down(silu(gate) * up)"],
        ),
        (
            "minimax-m3",
            ["experts: down(min(gate, 0.7) * sigmoid(1.702 * min(gate, 0.7)) * (clamp(up, 0.7) + 1))"],
        ),
        (
            "step-3.7",
            [
                "experts: down(min(silu(gate), 0.7) * clamp(up, 0.7)), shared ones down(silu(gate) * up)",
                "experts: down(silu(gate) * up), shared ones down(min(silu(gate), 0.4) * clamp(up, 0.4))",
            ],
        ),
        ("llama-4", ["experts: down(silu(gate) * up), weights on their input"]),
        (
            "deepseek-v4",
            [
                "experts: down(silu(min(gate, 0.7)) * clamp(up, 0.7))",
                "not served: 0: experts are chosen by the token's id, which requests do not carry",
            ],
        ),
    ],
)
def test_layers_says_what_was_understood(
    family: str, lines: list[str], tmp_path: Path, capsys: Output
) -> None:
    directory = Checkpoint(family, tmp_path / "model").directory
    capsys.readouterr()
    assert main(["layers", str(directory)]) == 0
    got = capsys.readouterr().out.splitlines()
    assert [line for line in got if line.startswith(("experts", "not"))] == lines
    assert main(["layers", "--json", str(directory)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert {f"experts: {text}" for text in about["experts"].values()} == {
        line.removesuffix(", the shared one with a gate") for line in lines if line.startswith("experts")
    }
    assert about["shared_gate"] == (family == "qwen2")
    assert list(about["not_served"]) == (["0"] if family == "deepseek-v4" else [])


@pytest.mark.slow
def test_layers_that_are_not_quantized(tmp_path: Path, capsys: Output) -> None:
    directory = Checkpoint("qwen3-dense", tmp_path / "model").directory
    capsys.readouterr()
    assert main(["layers", "--json", str(directory)]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [(entry["layer"], entry["format"]) for entry in layers] == [(1, "bf16"), (2, "bf16")]


def test_layers_of_an_unsupported_checkpoint(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["layers", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"expertd layers: {tmp_path}/config.json: model_type: expected one of ")


@pytest.mark.slow
def test_all_layers_are_served(checkpoint: Path, tmp_path: Path) -> None:
    with serving(["--model", checkpoint, "--layers", "all"], tmp_path) as server:
        served = {
            layer: server.get(f"/v2/models/model.layers.{layer}/ready").status_code for layer in range(4)
        }
    assert served == {0: 404, 1: 200, 2: 200, 3: 404}


def test_all_layers_of_a_checkpoint_without_any(checkpoint: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    edit_json(path / "config.json", first_k_dense_replace=9)
    with pytest.raises(CheckpointError, match=r"layers: expected a model with MoE layers, got none$"):
        models_of(CheckpointSettings(path=path, layers="all"))


def test_a_hub_id_gets_the_download_command() -> None:
    result = expertd("serve", "--model", "Qwen/Qwen3-30B-A3B-FP8", "--layers", "0")
    assert result.returncode == 2
    assert result.stderr == (
        "expertd: Qwen/Qwen3-30B-A3B-FP8: expected a directory with a checkpoint, got none with that name; "
        "for a model on the Hugging Face hub: "
        "hf download Qwen/Qwen3-30B-A3B-FP8 --local-dir Qwen/Qwen3-30B-A3B-FP8\n"
    )


def test_a_flag_that_is_not_an_assignment(config: Path, capsys: Output) -> None:
    _, about = check(capsys, "--config", config, "--set", "port")
    assert failed(about) == {"settings": "flag --set: expected KEY=VALUE, got 'port'"}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_listens_on_loopback_only(path: Path) -> None:
    assert not is_exposed(yaml.safe_load(path.read_text())["host"])


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


@pytest.mark.parametrize("command", ["serve", "check"])
def test_exposure_without_keys_is_refused(command: str, config: Path) -> None:
    result = expertd(command, "--config", config, "--host", "0.0.0.0")
    assert result.returncode == 2
    assert (
        "host: expected a loopback address without keys, got 0.0.0.0; give callers keys (--keys), or set "
        "insecure: true (--insecure) if only trusted hosts reach it\n"
    ) in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_exposed_server_logs_a_warning(host: str, config: Path) -> None:
    command: list[str | Path] = [EXPERTD, "serve", "--config", config]
    environment = clean_environment(EXPERTD_HOST=host, EXPERTD_INSECURE="true")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            log = []
            while "listening on http://" not in (line := process.stderr.readline()):
                assert line, "the server has ended"
                log.append(line)
        finally:
            process.kill()
    warnings = [line.partition(": ")[2].rstrip() for line in log if " WARNING " in line]
    assert warnings == (
        [] if host == "127.0.0.1" else [exposure(tiny_settings(host=host, port=0, insecure=True))]
    )


def test_check_reports_exposure(config: Path, capsys: Output) -> None:
    code, about = check(capsys, "--config", config, "--host", "0.0.0.0", "--port", "0", "--insecure")
    (detail,) = [result["detail"] for result in about["checks"] if result["name"] == "address"]
    assert (code, detail) == (0, exposure(tiny_settings(host="0.0.0.0", port=0, insecure=True)))


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
    with caplog.at_level(logging.WARNING):
        load(tiny_settings(backend=backend, models=[MODEL]), lambda: False)
    expected = (
        "backend auto: expected a GPU, because PyTorch is built for CUDA 13.0, got a CPU and backend "
        "'reference' (hopper: no CUDA device)"
    )
    assert [record.getMessage() for record in caplog.records] == ([expected] if warns else [])


def test_the_documented_list_matches_the_output_of_layers(checkpoint: Path, capsys: Output) -> None:
    document = (ROOT / "docs" / "checkpoints.md").read_text()
    (documented,) = re.findall(r"^```\n(/tmp/.*?)^```$", document, re.M | re.S)
    assert main(["layers", str(checkpoint)]) == 0
    assert capsys.readouterr().out.replace(str(checkpoint), "/tmp/small-deepseek-v3") == documented


def test_with_tls_an_exposed_server_is_warned_about_only_without_keys() -> None:
    tls = {"certificate": "a", "key": "b"}
    assert exposure(tiny_settings(host="0.0.0.0", keys="keys.yaml", tls=tls)) is None
    for more, who in (
        ({}, "anyone who can reach it"),
        ({"client_ca": "c"}, "anyone with a client certificate"),
    ):
        warning = exposure(tiny_settings(host="0.0.0.0", insecure=True, tls={**tls, **more}))
        assert f"beyond this machine without keys: {who} can" in str(warning)


def test_check_reports_certificates(config: Path, capsys: Output) -> None:
    def of_tls(certificate: str, key: str) -> tuple[int, str]:
        files = {"tls.certificate": FOLDER / f"{certificate}.pem", "tls.key": FOLDER / f"{key}.key"}
        given = [text for name, path in files.items() for text in ("--set", f"{name}={path}")]
        code, about = check(capsys, "--config", config, *given)
        (detail,) = [result["detail"] for result in about["checks"] if result["name"] == "tls"]
        return code, detail

    pem = FOLDER / "server.pem"
    assert of_tls("server", "server") == (0, f"the certificate in {pem} is valid until 2120-01-01")
    expired = f"warning: the certificate in {FOLDER / 'expired.pem'} has expired: clients refuse it"
    assert of_tls("expired", "server") == (0, expired)
    wrong = f"tls.key: {FOLDER / 'second.key'}: expected the key of {pem}, got another one"
    assert of_tls("server", "second") == (2, wrong)
    assert "tls.certificate: " in of_tls("none", "server")[1]
