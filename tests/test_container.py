"""The container files agree with each other and with the code; docs/container.md describes a real run."""

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from expertd.kernels.backends import architectures
from expertd.service.settings.loader import load_settings
from expertd.service.settings.parts import TlsSettings
from tests.paths import ROOT
from tests.service.certificates import TLS, load_tls

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Instruction = tuple[str, str]


def dockerfile() -> list[Instruction]:
    """Instructions in order, continuation lines joined, comments dropped."""
    lines = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def arguments_of(word: str) -> list[str]:
    return [rest for found, rest in dockerfile() if found == word]


def build_defaults() -> dict[str, str]:
    """Build arguments and their defaults."""
    pairs = (rest.partition("=") for rest in arguments_of("ARG"))
    return {name: value for name, equals, value in pairs if equals}


def image_environment() -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(arguments_of("ENV"))))


def compose(*names: str) -> dict[str, Any]:
    """The services of one Compose file."""
    services: dict[str, Any] = yaml.safe_load(ROOT.joinpath(*names).read_text())["services"]
    return services


def default_of(value: str) -> str:
    """The value that Compose uses if the variable is not set: "${NAME:-default}" becomes "default"."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_copied_paths_exist_and_pass_dockerignore() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    sources = [
        source.replace("${VARIANT}", variant)
        for rest in arguments_of("COPY")
        if not rest.startswith("--from=")
        for source in rest.split()[:-1]
        for variant in ("cpu", "cuda")
    ]
    assert "kernels" in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    mounted = {source for rest in arguments_of("RUN") for source in re.findall(r",source=([^,\s]+)", rest)}
    needed = {*sources, *mounted}
    assert {source if source in allowed else source.split("/")[0] for source in needed} == allowed


def test_image_settings_are_known_and_serve_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = image_environment()
    for name, value in environment.items():
        if name.startswith("EXPERTD_"):
            monkeypatch.setenv(name, value)
    config = Path(environment["EXPERTD_CONFIG"]).relative_to(arguments_of("WORKDIR")[-1])

    settings = load_settings(ROOT / config)

    assert settings.host == "0.0.0.0"
    assert arguments_of("EXPOSE") == [str(settings.port)]


def test_only_compose_goes_without_keys_and_publishes_on_loopback() -> None:
    assert "EXPERTD_INSECURE" not in image_environment(), "whoever runs the image decides"
    server = compose("docker-compose.yml")["expertd"]
    assert server["environment"]["EXPERTD_INSECURE"] == "true"
    published = [port for service in compose("docker-compose.yml").values() for port in service["ports"]]
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in published)


def test_base_image_and_label_are_the_projects() -> None:
    assert build_defaults()["VERSION"] == PROJECT["version"]
    version = build_defaults()["PYTHON_IMAGE"].partition(":")[2].partition("-")[0]
    assert version.count(".") == 2, f"expected a patch version, got {version}"
    assert version in SpecifierSet(PROJECT["requires-python"])


def test_each_variant_installs_its_lock_and_nothing_else() -> None:
    """All packages are installed by hash, except the CPU build of torch, which is pinned."""
    (fetching,) = [rest for rest in arguments_of("RUN") if "--require-hashes" in rest]
    steps = [step for step in fetching.split("&&") if " install " in step]
    (torch, locked) = [re.findall(r"-r (\S+?);? ", step + " ") for step in steps]
    assert (torch, locked) == (["requirements/torch-cpu.txt"], ["requirements/${VARIANT}.txt"])
    assert "--require-hashes" in steps[1]
    others = [rest for rest in arguments_of("RUN") if " install " in rest and rest != fetching]
    pip = [rest for rest in others if "apt-get" not in rest]
    assert [rest for rest in pip if "--no-index" not in rest] == []
    (debian,) = [rest for rest in others if "apt-get" in rest]
    assert "--no-install-recommends binutils" in debian, "only for the build: the image has no layer of it"


def test_every_kernel_is_compiled_for_every_gpu_that_it_supports() -> None:
    default = build_defaults()["TRITON_ARCHS"].strip('"')
    assert sorted(default.split()) == sorted(architectures("triton"))
    (run,) = [rest for rest in arguments_of("RUN") if "expertd kernels" in rest]
    (hopper,) = architectures("hopper")
    assert f"expertd kernels --build --bundle --arch {hopper} " in run
    assert re.search(
        r"for arch in \$\{TRITON_ARCHS\}; .*expertd kernels\s+--backend triton --build --bundle", run
    )
    assert "PYTHONPATH=/mnt/opt/triton " in run, "which is no part of the image"


def test_compose_build_defaults_are_the_dockerfiles() -> None:
    defaults = build_defaults()
    given = {
        name: default_of(value)
        for name, value in compose("docker-compose.yml")["expertd"]["build"]["args"].items()
    }
    assert given == {name: defaults[name] for name in given}
    assert compose("deploy", "compose", "gpu.yml")["expertd"]["build"]["args"] == {"VARIANT": "cuda"}


def test_compose_mounts_and_config_exist() -> None:
    services = compose("docker-compose.yml")
    mounts = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    paths = [mount for mount in mounts if mount.startswith(".")]
    assert paths
    config = default_of(services["expertd"]["environment"]["EXPERTD_CONFIG"])
    assert [path for path in [*paths, config] if not (ROOT / path).exists()] == []


def test_the_nodes_of_compose_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    base, nodes = compose("docker-compose.yml"), compose("deploy", "compose", "nodes.yml")
    settings = []
    merged = base["expertd"]["environment"] | nodes["expertd"]["environment"]
    for environment in (merged, nodes["expertd-1"]["environment"]):
        for name, value in {**image_environment(), **environment}.items():
            monkeypatch.setenv(name, default_of(value))
        settings.append(load_settings(ROOT / "configs" / "demo.yaml"))
        for name in environment:
            monkeypatch.delenv(name)
    assert [each.node_rank for each in settings] == [0, 1]
    assert {each.nnodes for each in settings} == {2}
    assert all(each.insecure for each in settings), "they meet beyond loopback, without keys"
    (rendezvous,) = {each.rendezvous for each in settings}
    assert rendezvous is not None
    assert rendezvous.partition(":")[0] in base, "the name of node 0's container"
    hardening = ("read_only", "cap_drop", "security_opt", "stop_grace_period")
    assert all(nodes["expertd-1"][name] == base["expertd"][name] for name in hardening)


def test_a_caller_of_compose_reaches_the_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    services = compose("deploy", "compose", "channels.yml")
    server, caller = services["expertd"], services["engine"]
    for name, value in {**image_environment(), **server["environment"]}.items():
        monkeypatch.setenv(name, value)
    channels = load_settings(ROOT / "configs" / "demo.yaml").channels
    assert channels.socket is not None
    assert server["group_add"] == caller["group_add"] == [channels.group]
    (volume,) = server["volumes"]
    assert [volume] == caller["volumes"]
    assert volume.split(":") == ["sockets", str(channels.socket.parent)]
    text = (ROOT / "deploy" / "compose" / "channels.yml").read_text()
    options = yaml.safe_load(text)["volumes"]["sockets"]["driver_opts"]["o"]
    (user,) = arguments_of("USER")
    assert options == f"uid={user.partition(':')[0]},gid={channels.group},mode=0750"


def test_compose_serves_a_model_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/consumer-card.md: two overrides and two variables."""
    text = (ROOT / "docs" / "consumer-card.md").read_text()
    overrides = re.findall(r"-f (deploy/compose/\S+\.yml)", text)
    assert overrides == ["deploy/compose/gpu.yml", "deploy/compose/models.yml"]
    (config,) = re.findall(r"^MODELS=/models CONFIG=(\S+) docker compose", text, re.M)
    assert "configs" in [rest.split()[0] for rest in arguments_of("COPY")], "so the image has it"
    for name, value in {
        **image_environment(),
        **compose("docker-compose.yml")["expertd"]["environment"],
    }.items():
        monkeypatch.setenv(name, default_of(value))
    settings = load_settings(ROOT / config)
    assert (settings.host, settings.backend) == ("0.0.0.0", "auto")
    (volume,) = compose(overrides[1])["expertd"]["volumes"]
    folder, target, mode = re.sub(r"\$\{MODELS:\?[^}]+\}", "/models", volume).split(":")
    assert mode == "ro"
    assert [str(checkpoint.path.parent) for checkpoint in settings.checkpoints] == [target] == [folder]
    (gpu,) = compose(overrides[0])["expertd"]["deploy"]["resources"]["reservations"]["devices"]
    assert (gpu["driver"], gpu["capabilities"]) == ("nvidia", ["gpu"])


def test_compose_gives_the_server_longer_than_it_may_drain() -> None:
    settings = load_settings(ROOT / "configs" / "demo.yaml")
    grace = compose("docker-compose.yml")["expertd"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > settings.shutdown_delay_seconds + settings.drain_timeout_seconds


def test_prometheus_scrapes_the_compose_service() -> None:
    config = yaml.safe_load((ROOT / "configs" / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target
        for job in config["scrape_configs"]
        for entry in job["static_configs"]
        for target in entry["targets"]
    ]
    assert targets == [f"expertd:{image_environment()['EXPERTD_PORT']}"]
    assert "expertd" in compose("docker-compose.yml")


class _Health(http.server.BaseHTTPRequestHandler):
    statuses: dict[str, int]

    def do_GET(self) -> None:
        self.send_response(self.statuses.get(self.path, 404))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
@pytest.mark.parametrize("has_tls", [False, True])
def test_healthcheck_follows_readiness(
    has_tls: bool, status: int, healthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rest,) = arguments_of("HEALTHCHECK")
    interpreter, *arguments = json.loads(rest.partition("CMD ")[2])
    assert interpreter == "/opt/expertd/bin/python"
    _Health.statuses = {"/v2/health/ready": status}
    # It must not go through a proxy: port 9 refuses connections.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        if has_tls:
            context = load_tls(TlsSettings.model_validate(TLS))
            server.socket = context.wrap_socket(server.socket, server_side=True)
            monkeypatch.setenv("EXPERTD_TLS__CERTIFICATE", "server.pem")
        monkeypatch.setenv("EXPERTD_PORT", str(server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        done = subprocess.run([sys.executable, *arguments], timeout=300, check=False)
        server.shutdown()
        thread.join()
    assert (done.returncode == 0) is healthy
