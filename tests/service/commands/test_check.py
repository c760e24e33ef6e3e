"""`expertd check`: the settings, their origins, and what would prevent a start."""

import json
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertd.service.cli import main
from expertd.service.commands import serve
from expertd.service.commands.devices import check_sockets
from expertd.service.commands.serve import exposure
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.ranks import shares
from expertd.service.tracing import tracing
from expertd.service.util.files import UnwritableError
from tests.paths import ROOT
from tests.service.apps import tiny_settings
from tests.service.certificates import FOLDER
from tests.service.full import REASONS, break_temporary_files
from tests.service.moe.test_weights import SHAPE
from tests.service.sockets import free_port

Output = pytest.CaptureFixture[str]


def check(capsys: Output, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = main(["check", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def failed(about: dict[str, Any]) -> dict[str, str]:
    return {result["name"]: result["detail"] for result in about["checks"] if result["ok"] is False}


def test_check_prints_what_each_rank_holds(
    checkpoint: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--port", "0", "--backend", "reference", "--model", checkpoint, "--layers", "all", "--ranks")
    code, about = check(capsys, *arguments, "2")
    assert (code, failed(about)) == (0, {})
    first, second = (
        result["detail"] for result in about["checks"] if result["name"].startswith("memory, rank ")
    )
    assert first.startswith("model.layers.1-2: experts 0-3 of 8 and 1 shared: ")
    assert second.startswith("model.layers.1-2: experts 4-7 of 8 and 1 shared: ")
    monkeypatch.setattr(shares, "free_host_bytes", lambda: 3_000_000)
    code, about = check(capsys, *arguments, "2")
    assert code == 2
    wrong = failed(about)
    assert wrong.keys() == {"memory, rank 0", "memory, rank 1"}
    assert all(detail.endswith("; 1.5 MB are free") for detail in wrong.values())
    _, about = check(capsys, *arguments, "9")
    expected = "at most the number of experts of model model.layers.1 (8)"
    assert failed(about)["checkpoints"] == f"checkpoints: ranks: expected {expected}, got 9"


def test_check_plans_for_gpus_that_are_not_here(checkpoint: Path, capsys: Output) -> None:
    served = ("--model", checkpoint, "--layers", "all")
    arguments = ("--port", "0", "--backend", "hopper", "--devices", "0-3", *served)
    _, about = check(capsys, *arguments)
    details = [result["detail"] for result in about["checks"] if result["name"].startswith("memory, rank ")]
    assert len(details) == 4
    assert "experts 6-7 of 8 and 1 shared: " in details[3]
    assert ", graphs " in details[3]
    assert ", exchange " in details[3]
    _, about = check(capsys, *arguments, "--shared-experts", "false")
    assert "experts 6-7 of 8 without the 1 shared: " in str(about["checks"])


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("build", "backend", "slower", "said"),
    [
        ("13.0", "auto", None, "cpu on cpu (hopper: no CUDA device; triton: no CUDA device)"),
        (
            "13.0",
            "auto",
            "a slow CPU",
            "reference on cpu (hopper: no CUDA device; triton: no CUDA device; cpu: a slow CPU)",
        ),
        ("13.0", "reference", None, "reference on cpu"),
        ("13.0", "cpu", "a slow CPU", "cpu on cpu"),
        (None, "auto", None, "cpu on cpu"),
        (None, "auto", "a slow CPU", "reference on cpu (cpu: a slow CPU)"),
    ],
)
def test_check_says_why_no_better_backend_is_used(
    build: str | None,
    backend: str,
    slower: str | None,
    said: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr("expertd.kernels.backends.cpu.why_slower", lambda: slower)
    _, about = check(capsys, "--config", config, "--port", "0", "--backend", backend)
    assert {"name": "backend", "ok": True, "detail": said} in about["checks"]


def test_check_says_what_a_budget_gives(config: Path, capsys: Output) -> None:
    layer = "{name: a, hidden_size: 2048, intermediate_size: 768, num_experts: 128, top_k: 8}"
    arguments = ("--config", config, "--port", "0", "--backend", "reference", "--set", f"models=[{layer}]")

    def detail(*more: str) -> str:
        _, about = check(capsys, *arguments, *more)
        (result,) = (each for each in about["checks"] if each["name"] == "expert store")
        return str(result["detail"])

    assert detail() == "none"
    assert detail("--set", "weights_budget=1GiB") == "none: all experts fit into weights_budget"
    said = detail("--set", f"weights_budget={10 * 2**30 // 48}")
    assert said.startswith("41 of 128 experts on the device; by copies alone, one token at a time, ")
    rate = 55e9 / (8 * (1 - 41 / 128) * 3 * (2048 * 768 + 4 * 16 * 6))
    assert (
        f"uniform routing: hits 32%, 25.7 MB to copy for a token: {rate * 25 / 55:.0f} tokens/s by PCIe 4"
        in said
    )
    assert f" {rate:.0f} tokens/s by PCIe 5 x16; Zipf routing: hits 70%" in said
    assert detail("--set", "weights_budget=1MiB").startswith("weights_budget: expected at least ")
    of_ranks = detail("--set", "ranks=2", "--set", f"weights_budget={10 * 2**30 // 48}")
    assert of_ranks.startswith(
        "82 of 128 experts on the 2 ranks' devices; by copies alone that all ranks share evenly, one "
    )
    placed = ("--set", "placement={policy: static, replicas: 16}")
    with_replicas = detail("--set", "ranks=2", *placed, "--set", f"weights_budget={10 * 2**30 // 48}")
    assert with_replicas.startswith("72 of 128 experts on the 2"), "82 of 144"
    rate = 2 * 55e9 / (8 * (1 - 82 / 128) * 3 * (2048 * 768 + 4 * 16 * 6))
    assert (
        f" to copy for a token: {rate * 25 / 55:.0f} tokens/s by PCIe 4 x16, {rate:.0f} tokens/s by"
        in of_ranks
    )


def test_the_configuration_for_a_consumer_card_serves_a_downloaded_model(
    checkpoint: Path, capsys: Output
) -> None:
    arguments = ("--config", ROOT / "configs" / "rtx4070.yaml", "--port", "0")
    code, about = check(capsys, *arguments)
    assert code == 2
    assert failed(about)["checkpoints"].startswith("/models/Qwen3-30B-A3B-FP8/config.json: cannot be read: ")
    code, about = check(capsys, *arguments, "--set", f"checkpoints.0.path={checkpoint}")
    assert (code, failed(about)) == (0, {})
    assert "none: all experts fit into weights_budget" in str(about["checks"])


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
        "settings", "checkpoints", "weights", "grpc", "tracing", "keys", "tls", "address", "rendezvous",
        "channels", "temporary folder", "backend", "expert store", "kernel cache", "cpus",
        "partitions",
        "memory",
        "host memory",
    ]  # fmt: skip


def test_only_what_differs_from_the_defaults_is_printed(
    config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is given as it is by default."""
    monkeypatch.setenv("EXPERTD_LIMITS__MAX_QUEUE_TOKENS", "7000")
    given = ("--set", "limits.max_headers=100", "--set", "partitions={}")
    arguments = ("--config", config, "--port", "0", *given)
    code, about = check(capsys, "--changed", *arguments)
    assert code == 0
    changed = {row["key"]: row["value"] for row in about["settings"] if not row["key"].startswith("models.")}
    assert {"port": 0, "limits.max_queue_tokens": 7000}.items() <= changed.items()
    assert changed.keys() & {"host", "limits.max_headers", "partitions", "channels.socket"} == set()
    assert "models.0.weight" not in {row["key"] for row in about["settings"]}
    assert main(["check", "--changed", *map(str, arguments)]) == 0
    assert capsys.readouterr().out.startswith("the server would start\n\nsetting ")
    assert main(["check", "--changed", *map(str, arguments), "--uds", "/no/such"]) == 2
    assert capsys.readouterr().out.startswith("the server would not start: address\n\nsetting ")
    assert main(["check", "--changed", "--set", "prot=1", "--set", "hots=x"]) == 2
    assert capsys.readouterr().out.startswith("the server would not start: settings\n\ncheck "), "once"


@pytest.mark.parametrize("kind", REASONS)
def test_a_temporary_folder_is_found_missing_before_the_start(
    kind: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Only HTTP processes cannot do without: they have a socket there."""
    tried = break_temporary_files(monkeypatch, kind, tmp_path)
    expected = "expected a folder for temporary files (TMPDIR) that can be written to"
    text = f"{expected}, got {tried}: {REASONS[kind]}"
    several = ("--config", config, "--http-workers", "2")
    code, about = check(capsys, *several)
    assert (code, failed(about)) == (2, {"temporary folder": f"http_workers: {text}"})
    assert main(["serve", *map(str, several)]) == 2, "before it listens"
    assert capsys.readouterr().err == f"expertd: http_workers: {text}\n"
    for ranks in ("1", "2"):
        code, about = check(capsys, "--config", config, "--ranks", ranks)
        details = {result["name"]: result["detail"] for result in about["checks"]}
        assert (code, details["temporary folder"]) == (0, f"warning: profiles: {text}")


def test_ranks_on_gpus_have_sockets_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus = tiny_settings(backend="hopper", devices="0-1")
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ValueError, match=rf"^devices: expected a path of at most 90 bytes .*: {long}$"):
        check_sockets(on_gpus)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(
        UnwritableError, match=rf"^devices: expected a folder .*, got {tmp_path}/gone: No such f"
    ):
        check_sockets(on_gpus)
    check_sockets(tiny_settings())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check_sockets(on_gpus)
    assert list(tmp_path.iterdir()) == [long]


def test_a_socket_of_http_processes_needs_a_short_path(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    code, about = check(capsys, "--config", config, "--http-workers", "2")
    assert code == 2
    text = failed(about)["temporary folder"]
    assert text.startswith(f"http_workers: expected a path for a new socket, got {long}/expertd-")
    assert text.endswith(": AF_UNIX path too long")
    assert list(long.iterdir()) == []


@pytest.mark.parametrize(("place", "reason"), [("cache", ""), ("file/cache", "Not a directory")])
def test_a_kernel_cache_that_cannot_be_written_is_a_warning(
    place: str, reason: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXPERTD_CACHE_DIR", str(tmp_path / place))
    _, about = check(capsys, "--config", config, "--backend", "hopper")
    (found,) = (result for result in about["checks"] if result["name"] == "kernel cache")
    assert found["ok"]
    if reason:
        text = f"kernel cache: expected a folder that can be written to, got {tmp_path / place}: {reason}"
        more = "what is compiled at a start is not kept for the next one"
        assert found["detail"] == f"warning: {text}: {more}"
    else:
        assert found["detail"] == str(tmp_path / place)
        assert not (tmp_path / place).exists()


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
    _, about = check(capsys, "--config", config, "--set", "port")
    assert failed(about) == {"settings": "flag --set: expected KEY=VALUE, got 'port'"}


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
    path.rmdir()
    for group, wrong in ((str(os.getgid()), []), ("none-such", ["channels"])):
        given = f"channels={{socket: {path}, group: {group}}}"
        _, about = check(capsys, "--config", config, "--port", "0", "--set", given)
        assert list(failed(about)) == wrong
    _, about = check(capsys, "--config", config, "--set", "partitions={p: 8}")
    assert failed(about)["partitions"].startswith("partitions: expected a backend whose device has SMs")
    _, about = check(capsys, "--model", tmp_path, "--layers", "all", "--port", "0")
    assert failed(about) == {
        "checkpoints": f"{tmp_path}/config.json: cannot be read: No such file or directory"
    }
    _, about = check(capsys, "--set", "models=[]", "--set", "prt=1")
    assert failed(about).keys() == {"settings"}
    assert about["settings"] == []


@pytest.mark.usefixtures("no_gpu")
def test_check_looks_at_the_rendezvous(config: Path, capsys: Output, tmp_path: Path) -> None:
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
        unusable = ("--set", f"channels.socket={tmp_path}")
        assert "channels" in failed(check(capsys, *given, *unusable)[1])
        assert failed(check(capsys, *given, *unusable, "--node-rank", "1")[1]) == {}
    assert check(capsys, *given)[0] == 0


@pytest.mark.usefixtures("no_gpu")
def test_a_rendezvous_where_the_server_listens_is_refused(
    config: Path, capsys: Output, tmp_path: Path
) -> None:
    port = free_port()
    place, nodes = f"127.0.0.1:{port}", ("--nnodes", "2", "--rendezvous")
    for host in ("localhost", "127.0.0.1", "0.0.0.0"):
        given = ("--config", config, "--insecure", "--host", host, "--port", str(port), *nodes)
        code, about = check(capsys, *given, place)
        expected = f"another port than the server's own, {host}:{port}"
        assert code == 2
        assert failed(about) == {"rendezvous": f"rendezvous: expected {expected}, got {place}"}
        assert main(["serve", *map(str, given), place]) == 2, "before it listens"
        assert capsys.readouterr().err == f"expertd: rendezvous: expected {expected}, got {place}\n"
        assert check(capsys, *given, place, "--node-rank", "1")[0] == 0, "there is no server"
    of_grpc = ("--config", config, "--set", f"grpc.port={port}", *nodes, place)
    for more in ([], ["--uds", str(tmp_path / "uds")]):
        code, about = check(capsys, *of_grpc, *more)
        expected = f"another port than the server's own, 127.0.0.1:{port}"
        assert failed(about) == {"rendezvous": f"rendezvous: expected {expected}, got {place}"}
        assert main(["serve", *map(str, [*of_grpc, *more])]) == 2
    given = ("--config", config, "--insecure", "--host", "127.0.0.1", "--port", str(port), *nodes)
    assert check(capsys, *given, f"127.0.0.2:{port}")[0] == 0, "another address"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("backend", ["--devices", "0-1"], "devices: expected GPUs 0-1 of this machine, got none"),
        (
            "backend",
            ["--devices", "0", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"],
            "devices: expected GPUs 0 of this machine, got none",
        ),
        (
            "partitions",
            ["--set", "partitions={p: 8}", "--backend", "cpu"],
            "partitions: expected a backend whose device has SMs to partition, got 'cpu'",
        ),
    ],
)
def test_missing_gpus_are_named_before_the_port_is_opened(
    name: str, given: list[str], expected: str, config: Path, capsys: Output
) -> None:
    arguments = ["--config", str(config), "--backend", "auto", *given]
    assert failed(check(capsys, *arguments)[1])[name] == expected
    assert main(["serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == f"expertd: {expected}"
    assert "listening" not in err


def test_a_gpu_beyond_those_of_the_machine_is_named(
    config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    expected = "devices: expected numbers below 2, the GPUs of this machine, got 2"
    assert main(["serve", "--config", str(config), "--backend", "hopper", "--devices", "1-2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"expertd: {expected}"


@pytest.mark.parametrize("node", [[], ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"]])
def test_missing_packages_prevent_a_start_on_every_node(
    node: list[str], config: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda _: None)
    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    without = ["--config", str(config), "--set", "tracing.endpoint=http://127.0.0.1:1", *node]
    given = [*without, "--set", "grpc.port=0"]
    _, about = check(capsys, *given)
    wrong = failed(about)
    assert wrong["grpc"].startswith("grpc.port: expected the packages of expertd[grpc]")
    assert wrong["tracing"].startswith("tracing.endpoint: expected the packages of expertd[otel]")
    assert main(["serve", *given]) == 2
    assert wrong["grpc"] in capsys.readouterr().err
    _, about = check(capsys, *without)
    assert "tracing" in failed(about), "also without gRPC"


def test_check_reads_the_headers_of_weights(config: Path, capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    given = ("--config", config, "--set", f"models.0.weights={{path: {path}}}")
    save_weights(path, random_weights(SHAPE, 0, "cpu"))
    assert check(capsys, *given)[0] == 0
    save_file({"other": torch.zeros(1)} | load_file(path), path)
    code, about = check(capsys, *given)
    assert code == 2
    assert failed(about)["weights"].endswith("got 1 unknown: other")


def test_nothing_is_said_of_the_memory_for_a_bad_checkpoint(
    checkpoint: Path, capsys: Output, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    file = directory / index["weight_map"]["model.layers.2.mlp.experts.3.up_proj.weight"]
    os.truncate(file, size := file.stat().st_size - 1)
    arguments = ["--model", str(directory), "--layers", "all", "--port", "0", "--backend", "reference"]
    code, about = check(capsys, *arguments)
    expected = f"{file}: expected a safetensors file, got: {size} bytes instead of {size + 1}"
    assert (code, failed(about)) == (2, {"checkpoints": expected})
    unknown = {result["name"] for result in about["checks"] if result["ok"] is None}
    assert unknown == {"memory", "host memory"}
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert re.search(r"^memory +not checked +not known without the checkpoints' layers$", captured.out, re.M)
    assert captured.err == "expertd check: the server would not start\n"


def test_check_reports_exposure(config: Path, capsys: Output) -> None:
    code, about = check(capsys, "--config", config, "--host", "0.0.0.0", "--port", "0", "--insecure")
    (detail,) = [result["detail"] for result in about["checks"] if result["name"] == "address"]
    assert (code, detail) == (0, exposure(tiny_settings(host="0.0.0.0", port=0, insecure=True)))


def test_check_reports_certificates(config: Path, capsys: Output) -> None:
    def of_tls(certificate: str, key: str) -> tuple[int, str]:
        files = {"tls.certificate": FOLDER / f"{certificate}.pem", "tls.key": FOLDER / f"{key}.key"}
        given = [text for name, path in files.items() for text in ("--set", f"{name}={path}")]
        code, about = check(capsys, "--config", config, *given)
        (detail,) = [result["detail"] for result in about["checks"] if result["name"] == "tls"]
        return code, detail

    assert of_tls("server", "server")[0] == 0
    expired = f"warning: the certificate in {FOLDER / 'expired.pem'} has expired: clients refuse it"
    assert of_tls("expired", "server") == (0, expired)
    assert of_tls("server", "second")[0] == 2
    assert "tls.certificate: " in of_tls("none", "server")[1]
