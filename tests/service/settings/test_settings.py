"""Settings: file, environment and flags override each other, and invalid ones are refused."""

import json
from pathlib import Path

import pytest
import yaml

from expertd.kernels import backend_names
from expertd.service.checkpoints import CheckpointError, resolve_checkpoints
from expertd.service.settings.fields import ENV_PREFIX
from expertd.service.settings.loader import Flag, SettingsError, default_config, load_settings
from expertd.service.settings.model import Settings
from expertd.service.settings.spans import numbers, spans
from tests.paths import DEMO, ROOT
from tests.service.settings.refusals import MODEL

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


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
        ([""], r"^flag --layers: checkpoints\.0\.layers: expected "),
        (["5-3"], r"^flag --layers: checkpoints\.0\.layers: expected ranges from a lower .*, got 5-3"),
    ],
)
def test_an_invalid_flag_for_a_checkpoint_is_named(config: Path, layers: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(config, checkpoint_flags(*layers))


def test_all_layers_of_a_checkpoint_are_served_unless_some_are_named(config: Path) -> None:
    layers = [load_settings(config, checkpoint_flags(*given)).checkpoints[0].layers for given in ([], ["3"])]
    assert layers == ["all", "3"]


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(None) == load_settings(DEMO)
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
