"""Settings: file, environment and flags override each other, and invalid ones are refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from expertd.kernels import backend_names
from expertd.service.checkpoints import CheckpointError, resolve_checkpoints
from expertd.service.settings.loader import Flag, SettingsError, default_config, load_settings
from expertd.service.settings.model import ENV_PREFIX, Settings
from expertd.service.settings.spans import numbers, spans
from tests.paths import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MODEL = "{name: m, hidden_size: 256, intermediate_size: 128, num_experts: 4, top_k: 2}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"port: 1000\nlimits: {{max_batch_tokens: 5000}}\nmodels: [{MODEL}]\n")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(path: Path) -> None:
    settings = load_settings(path)
    for model in settings.models:
        largest = settings.limits.max_request_tokens * model.hidden_size * 4
        assert largest < settings.limits.max_body_bytes, "the largest allowed request fits in FP32"


def test_there_are_configs_to_load() -> None:
    assert {path.stem for path in CONFIGS} >= {"demo", "h200-deepseek-v3", "h200-qwen3-30b-a3b"}


def test_the_environment_overrides_the_file_and_flags_override_both(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(config).port == 1000
    monkeypatch.setenv("EXPERTD_PORT", "2000")
    monkeypatch.setenv("EXPERTD_LIMITS__MAX_QUEUE_TOKENS", "7000")
    settings = load_settings(config)
    assert settings.port == 2000
    assert settings.limits.max_queue_tokens == 7000
    assert settings.limits.max_batch_tokens == 5000, "nested values of the file are kept"
    assert load_settings(config, [Flag("--port", "port", "3000")]).port == 3000


def test_settings_built_directly_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_PORT", "2000")
    model = {"name": "m", "hidden_size": 256, "intermediate_size": 128, "num_experts": 4, "top_k": 2}
    assert Settings.model_validate({"models": [model]}).port == 8000


@pytest.mark.parametrize("name", ["auto", *backend_names()])
def test_every_backend_can_be_set(config: Path, name: str) -> None:
    assert load_settings(config, [Flag("--backend", "backend", name)]).backend == name


def test_settings_are_frozen(config: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings(config).port = 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"models: [{MODEL}]\ncolour: red",
            r"bad\.yaml:2: colour: expected one of host, port, .*models.*, got an unknown setting",
        ),
        (
            f"models: [{MODEL}]\nlimits: {{batch: 1}}",
            r"limits\.batch: expected one of max_batch.*, got an unknown setting",
        ),
        (
            f"models: [{MODEL[:-1]}, k: 3}}]",
            r"models\.0\.k: expected one of name, hidden_size.*, got an unknown setting",
        ),
        (
            f"models: [{MODEL}]\nport: 70000",
            r"port: .* less than or equal to 65535, got 70000",
        ),
        (f"models: [{MODEL}]\nport: many", r"port: expected a valid integer.*got 'many'"),
        (f"models: [{MODEL}]\nbackend: tpu", r"backend: expected one of auto, .*got 'tpu'"),
        (f"models: [{MODEL.replace('256', '200')}]", r"models\.0\.hidden_size: .*multiple of 128, got 200"),
        (
            f"models: [{MODEL.replace('top_k: 2', 'top_k: 9')}]",
            r"models\.0\.top_k: expected 1 to num_experts .4., got 9",
        ),
        (
            f"models: [{MODEL[:-1]}, routing: {{scoring_func: tanh}}}}]",
            r"routing\.scoring_func: .*'sigmoid'.* got 'tanh'",
        ),
        (
            f"models: [{MODEL[:-1]}, routing: {{num_expert_groups: 3}}}}]",
            r"num_experts: expected a multiple of num_expert_groups .3., got 4",
        ),
        (
            f"models: [{MODEL[:-1]}, routing: {{num_expert_groups: 4}}}}]",
            r"top_k: expected at most the 1 experts of topk_group, got 2",
        ),
        (
            f"models: [{MODEL[:-1]}, routing: {{topk_group: 2}}}}]",
            r"topk_group: expected 1 to num_expert_groups .1., got 2",
        ),
        (
            f"models: [{MODEL[:-1]}, routing: {{routed_scaling_factor: .inf}}}}]",
            r"routing\.routed_scaling_factor: .*equal to 1000000, got inf",
        ),
        (f"models: [{MODEL}, {MODEL}]", r"models: expected different names, got 'm' 2 times"),
        (
            f"models: [{MODEL[:-1]}, partition: p}}]",
            r"models\.0\.partition: expected one of partitions \(none\), got 'p'",
        ),
        (
            f"models: [{MODEL[:-1]}, weights: {{}}}}]",
            r"models\.0\.weights: expected exactly one of seed and path, got neither",
        ),
        (
            f"models: [{MODEL[:-1]}, weights: {{seed: 1, layer: 3}}}}]",
            r"weights\.layer: expected one of seed, path, got an unknown setting",
        ),
        (
            f"models: [{MODEL[:-1]}, local_experts: 2-4}}]",
            r"local_experts: expected a range of 0 to 3, got 2-4",
        ),
        (
            f"models: [{MODEL[:-1]}, local_experts: 3-2}}]",
            r"local_experts: expected ranges from a lower .*, got 3-2",
        ),
        (
            f"models: [{MODEL[:-1]}, local_experts: '0-1,3'}}]",
            r"local_experts: expected one range like 0-63, got '0-1,3'",
        ),
        (
            f"models: [{MODEL[:-1]}, local_experts: 1, masked_max_tokens: 2}}]",
            r"masked_max_tokens: expected 0 with local_experts",
        ),
        (
            f"models: [{MODEL[:-1]}, num_shared_experts: 1021}}]",
            r"num_shared_experts: expected at most 1024 experts .*, got 1025",
        ),
        (
            "checkpoints: [{path: /none, layers: 3-x}]",
            r"\.layers: expected all, or numbers and ranges .*, got '3-x'",
        ),
        ("checkpoints: [{path: /none, layers: '1,3,1'}]", r"layers: expected each number once, got 1,3,1"),
        (
            "checkpoints: [{path: /none, layers: '\uff11'}]",
            r"layers: expected all, or numbers and ranges .*, got '.uff11'",
        ),
        (
            f"models: [{MODEL[:-1]}, weights: {{seed: 9223372036854775808}}}}]",
            r"models\.0\.weights\.seed: .*less than or equal to 9223372036854775807, got 9223372036854775808",
        ),
        (
            f"models: [{MODEL}]\nlimits: {{max_batch_tokens: 5}}",
            r"limits\.max_request_tokens: expected at most max_batch_tokens \(5\), got 4096",
        ),
        *(
            (f"models: [{MODEL}]\n{name}: .inf", rf"{name}: expected a finite number, got inf")
            for name in ("shutdown_delay_seconds", "drain_timeout_seconds")
        ),
        (f"models: [{MODEL}]\npartitions: {{p: 0}}", r"partitions\.p: expected at least 1 SM, got 0"),
        (
            f"models: [{MODEL}]\nranks: 5",
            r"ranks: expected at most num_experts of model m \(4\), got 5",
        ),
        (
            f"models: [{MODEL[:-1]}, local_experts: 0-1}}]\nranks: 2",
            r"models\.0\.local_experts: expected null with several ranks, got 0-1",
        ),
        (
            f"models: [{MODEL[:-1]}, masked_max_tokens: 8}}]\ndevices: [0, 1]",
            r"models\.0\.masked_max_tokens: expected 0 with several ranks, got 8",
        ),
        (
            "checkpoints: [{path: /none, layers: 3, experts: 0-1}]\ndevices: 0-1",
            r"checkpoints\.0\.experts: expected null with several ranks, got 0-1",
        ),
        (
            f"models: [{MODEL}]\nbackend: reference\ndevices: [0, 1]",
            r"devices: expected backend hopper, got 'reference'",
        ),
        (f"models: [{MODEL}]\ndevices: 1", r"devices: expected two GPUs or more, got 1"),
        (f"models: [{MODEL}]\nnnodes: 2", r"rendezvous: expected HOST:PORT with nnodes 2, got none"),
        (
            f"models: [{MODEL}]\nnnodes: 2\nnode_rank: 2\nrendezvous: a:1",
            r"node_rank: expected less than nnodes \(2\), got 2",
        ),
        *(
            (
                f"models: [{MODEL}]\nrendezvous: '{text}'",
                rf"rendezvous: expected HOST:PORT, with a port of 1 to 65535, got '{text}'",
            )
            for text in ("a", "a:0", "a:65536", ":1", "a:b:1", "a b:1")
        ),
        (
            f"models: [{MODEL}]\nnnodes: 3\nranks: 2\nrendezvous: a:1",
            r"ranks: expected at most num_experts of model m \(4\), got 6",
        ),
        (f"models: [{MODEL}]\ndevices: [1, 1]", r"devices: expected each number once, got 1,1"),
        (
            f"models: [{MODEL}]\ndevices: 0-1\nranks: 3",
            r"ranks: expected the number of devices \(2\), got 3",
        ),
        (
            f"models: [{MODEL}]\nplacement: {{policy: static}}",
            r"placement\.policy: expected null with one rank, got 'static'",
        ),
        (
            f"models: [{MODEL}]\nranks: 2\nplacement: {{replicas: 1}}",
            r"placement\.replicas: expected 0 without placement\.policy, got 1",
        ),
        (
            f"models: [{MODEL}]\nranks: 3\nplacement: {{policy: balanced, replicas: 9}}",
            r"placement\.replicas: expected at most 8, with which every rank has all experts.*, got 9",
        ),
        (
            f"models: [{MODEL}]\ndevices: 0-1\nplacement: {{policy: static}}",
            r"placement\.policy: expected null with devices, got 'static'",
        ),
        (
            f"models: [{MODEL}]\ndevices: 0-1\nexact_combine: true",
            r"exact_combine: expected false with devices, got true",
        ),
        (
            f"models: [{MODEL}]\nranks: 2\nplacement: {{policy: best}}",
            r"placement\.policy: expected 'static' or 'balanced', got 'best'",
        ),
        (
            f"models: [{MODEL}]\nranks: 2\nplacement: {{policy: balanced, interval_seconds: 0}}",
            r"placement\.interval_seconds: expected a number greater than 0, got 0",
        ),
        ("models: []", r"models or checkpoints: expected at least one layer to serve, got none"),
        ("port: 1", r"models or checkpoints: expected at least one layer to serve, got none"),
        ("- a\n- b", r"expected an object with names of settings, got \['a', 'b'\]"),
        ("", r"models or checkpoints: expected at least one layer to serve, got none"),
        ("models: [", r"expected YAML"),
    ],
)
def test_invalid_settings_are_refused_with_one_sentence(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=expected) as caught:
        load_settings(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


TWO_WRONG = (
    MODEL.replace("256", "200").replace("m,", "a,"),
    MODEL.replace("top_k: 2", "top_k: 9").replace("m,", "b,"),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "checkpoints: [{path: /none, layer: 3}]",
            [
                r":1: checkpoints\.0\.layer: expected one of path, layers,.*, got an unknown setting",
                r":1: checkpoints\.0\.layers: expected a value, got none",
            ],
        ),
        (
            f"port: many\nmodels:\n- {TWO_WRONG[0]}\n- {TWO_WRONG[1]}\n"
            "limits: {max_headers: 0}\ncolour: red",
            [
                r":6: colour: expected one of host, .*, got an unknown setting",
                r":1: port: expected a valid integer, got 'many'",
                r":5: limits\.max_headers: expected a number greater than or equal to 1, got 0",
                r":3: models\.0\.hidden_size: expected a multiple of 128, got 200",
                r":4: models\.1\.top_k: expected 1 to num_experts \(4\), got 9",
            ],
        ),
        (
            "limits: {max_batch_tokens: 5, max_queue_tokens: 6}\nbackend: tpu",
            [
                r":2: backend: expected one of auto, .*, got 'tpu'",
                r":1: limits\.max_request_tokens: expected at most max_batch_tokens \(5\), got 4096",
                r":1: limits\.max_request_tokens: expected at most max_queue_tokens \(6\), got 4096",
            ],
        ),
        (
            f"ranks: 5\nmodels:\n- {MODEL}\n- {MODEL[:-1]}, partition: p}}\nlimits:\n  max_buffered_bytes: 1",
            [
                r":2: models: expected different names, got 'm' 2 times",
                r":4: models\.1\.partition: expected one of partitions \(none\), got 'p'",
                r":1: ranks: expected at most num_experts of model m \(4\), got 5",
                r":6: limits\.max_buffered_bytes: expected at least [0-9]+, got 1",
            ],
        ),
    ],
)
def test_every_mistake_is_reported_on_a_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    lines = str(caught.value).splitlines()
    assert list(caught.value.mistakes) == lines
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(re.escape(str(path)) + pattern, line), line


def test_a_long_list_of_mistakes_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("".join(f"key_{number}: 1\n" for number in range(100)))
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    *listed, last = caught.value.mistakes
    assert [line.split(": ")[1] for line in listed] == [f"key_{number}" for number in range(20)]
    assert last == f"{path}: expected valid settings, got 80 more that are not"


def test_ranks_of_several_nodes() -> None:
    given = {"models": [yaml.safe_load(MODEL)], "rendezvous": "node-0:29500", "nnodes": 2}
    for more in ({"ranks": 2}, {"devices": "0-1"}):
        settings = Settings.model_validate({**given, **more})
        assert (settings.num_ranks, settings.ranks_per_node) == (4, 2)
    assert Settings.model_validate({**given, "devices": "0"}).num_ranks == 2, "one GPU of each node"


def test_ranks_combine_exactly_where_placements_change(config: Path) -> None:
    ranks, policy = Flag("--ranks", "ranks", "2"), Flag("--set", "placement.policy", "static")
    given = Flag("--set", "exact_combine", "false")
    assert not load_settings(config, [ranks]).combines_exactly
    assert load_settings(config, [ranks, policy]).combines_exactly
    assert not load_settings(config, [ranks, policy, given]).combines_exactly
    assert load_settings(config, [ranks, Flag("--set", "exact_combine", "true")]).combines_exactly


def test_the_demo_with_ranks_is_the_same_layer() -> None:
    demo, shared = (load_settings(ROOT / "configs" / f"{name}.yaml") for name in ("demo", "demo-2ranks"))
    assert shared.models == demo.models
    assert (demo.num_ranks, shared.num_ranks) == (1, 2)


def test_ranks_are_counted_by_devices_or_alone(config: Path) -> None:
    assert load_settings(config).num_ranks == 1
    assert load_settings(config, [Flag("--ranks", "ranks", "4")]).num_ranks == 4
    assert load_settings(config, [Flag("--devices", "devices", "0-2")]).num_ranks == 3
    config.write_text(config.read_text() + "devices: [1, 0]\n")
    assert load_settings(config).devices == "1,0"


def test_an_invalid_flag_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_PORT", "9000")
    with pytest.raises(SettingsError, match=r"^flag --port: port: .*65535, got '99999'"):
        load_settings(config, [Flag("--port", "port", "99999")])
    with pytest.raises(SettingsError, match=r"^flag --log-level: log_level: .*got 'loud'"):
        load_settings(config, [Flag("--log-level", "log_level", "loud")])


def checkpoint_flags(*layers: str) -> list[Flag]:
    model = [Flag("--model", "models", []), Flag("--model", "checkpoints", [{"path": Path("/none")}])]
    return model + [Flag("--layers", "checkpoints.0.layers", text) for text in layers]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"^flag --model: checkpoints\.0\.layers: expected a value, got none"),
        (["5-3"], r"^flag --layers: checkpoints\.0\.layers: expected ranges from a lower .*, got 5-3"),
    ],
)
def test_an_invalid_flag_for_a_checkpoint_is_named(config: Path, layers: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(config, checkpoint_flags(*layers))


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^config: expected a file in --config or EXPERTD_CONFIG, or"):
        load_settings(None)
    monkeypatch.setenv("EXPERTD_MODELS", json.dumps([yaml.safe_load(MODEL)]))
    assert [model.name for model in load_settings(None).models] == ["m"]
    monkeypatch.setenv("EXPERTD_CHECKPOINTS", '[{"path": "/none", "layers": 3}]')
    with pytest.raises(CheckpointError, match=r"^/none/config\.json: cannot be read"):
        resolve_checkpoints(load_settings(None))


def test_numbers_and_spans_are_inverse() -> None:
    assert numbers("3-5,9,7") == [3, 4, 5, 9, 7]
    assert spans([9, 3, 5, 4, 7]) == "3-5,7,9"
    assert spans([]) == ""


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "EXPERTD_PROT",
            "1",
            r"^environment variable EXPERTD_PROT: prot: expected one of host, .*, got an unknown setting",
        ),
        (
            "EXPERTD_LIMITS__QUEUE",
            "1",
            r"^environment variable EXPERTD_LIMITS__QUEUE: limits\.queue: expected one of max_",
        ),
        ("EXPERTD_PORT", "x", r"^environment variable EXPERTD_PORT: port: .*got 'x'"),
        (
            "EXPERTD_LIMITS__MAX_BATCH_TOKENS",
            "1",
            r"^environment variable EXPERTD_LIMITS__MAX_BATCH_TOKENS: limits\.max_request_tokens: .* 4096",
        ),
        ("EXPERTD_MODELS", "[{", r"^environment variable EXPERTD_MODELS: models: expected YAML, got "),
    ],
)
def test_an_invalid_variable_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=expected) as caught:
        load_settings(config)
    assert "\n" not in str(caught.value)


def test_variables_of_a_kubernetes_service_called_expertd_are_not_settings(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT": "tcp://10.0.0.1:80",
        "PORT_80_TCP": "tcp://10.0.0.1:80",
        "PORT_80_TCP_ADDR": "10.0.0.1",
    }
    for name, value in links.items():
        monkeypatch.setenv(ENV_PREFIX + name, value)
    monkeypatch.setenv("EXPERTD_CACHE_DIR", "/tmp/cache")
    assert load_settings(config).port == 1000


def test_the_config_file_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTD_CONFIG", raising=False)
    assert default_config() is None
    monkeypatch.setenv("EXPERTD_CONFIG", "/etc/expertd.yaml")
    assert default_config() == Path("/etc/expertd.yaml")
