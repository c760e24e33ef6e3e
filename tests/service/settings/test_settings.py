"""Settings: file, environment and flags override each other, and what follows from the values."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from expertd.service.checkpoints import CheckpointError, resolve_checkpoints
from expertd.service.http.listening import is_exposed
from expertd.service.settings.fields import ENV_PREFIX
from expertd.service.settings.loader import Flag, SettingsError, default_config, load_settings
from expertd.service.settings.model import Settings
from tests.paths import DEMO, ROOT
from tests.service.checkpoints.cards import CONFIG as CARD
from tests.service.checkpoints.cards import QWEN3, settings_of
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
    if path == CARD:  # its checkpoint is not here
        settings = settings_of(QWEN3)
    assert settings.models
    for model in settings.models:
        largest = settings.limits.max_request_tokens * model.hidden_size * 4
        assert largest < settings.limits.max_body_bytes, "the largest allowed request fits in FP32"
    assert not is_exposed(settings.host)


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
    assert settings({}).port == 8000


def test_settings_are_frozen(config: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings(config).port = 1


def checkpoint_flags(*layers: str) -> list[Flag]:
    model = [Flag("--model", "models", []), Flag("--model", "checkpoints", [{"path": Path("/none")}])]
    return model + [Flag("--layers", "checkpoints.0.layers", text) for text in layers]


def test_all_layers_of_a_checkpoint_are_served_unless_some_are_named(config: Path) -> None:
    layers = [load_settings(config, checkpoint_flags(*given)).checkpoints[0].layers for given in ([], ["3"])]
    assert layers == ["all", "3"]
    for text in ("", "5-3"):
        with pytest.raises(SettingsError, match=r"^flag --layers: checkpoints\.0\.layers: expected "):
            load_settings(config, checkpoint_flags(text))


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(None) == load_settings(DEMO)
    monkeypatch.setenv("EXPERTD_MODELS", json.dumps([yaml.safe_load(MODEL)]))
    assert [model.name for model in load_settings(None).models] == ["m"]
    monkeypatch.setenv("EXPERTD_CHECKPOINTS", '[{"path": "/none", "layers": 3}]')
    with pytest.raises(CheckpointError, match=r"^/none/config\.json: cannot be read"):
        resolve_checkpoints(load_settings(None))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "none.yaml")


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


MIB = 1 << 20
ROUNDING = 5 * MIB // 16


def settings(limits: dict[str, int], **changes: Any) -> Settings:
    return Settings.model_validate({"models": [yaml.safe_load(MODEL)], "limits": limits, **changes})


def test_the_default_follows_from_the_largest_body_and_the_number_of_processes() -> None:
    assert settings({}).buffered_bytes == 1024 * MIB
    assert settings({"max_body_bytes": 255 * MIB}).buffered_bytes == 1024 * MIB
    assert settings({"max_body_bytes": 512 * MIB}).buffered_bytes == 2048 * MIB + ROUNDING
    assert settings({}, http_workers=8).buffered_bytes == 8 * (256 * MIB + ROUNDING)


def test_the_default_follows_from_the_largest_tensors_in_regions() -> None:
    limits = dict.fromkeys(("max_request_tokens", "max_batch_tokens", "max_queue_tokens"), 1 << 20)
    assert settings(limits).buffered_bytes == 1024 * MIB, "without regions, tensors are in bodies"
    needed = (1 << 20) * (2 * 4 * 256 + 12 * 2) + ROUNDING
    regions = {"enabled": True}
    assert settings(limits, shared_memory=regions).buffered_bytes == needed
    assert settings(limits, shared_memory=regions, http_workers=2).buffered_bytes == 2 * needed


@pytest.mark.parametrize("http_workers", [1, 3])
def test_less_than_the_largest_request_needs_is_refused(http_workers: int) -> None:
    needed = http_workers * (4 * 100_000 + ROUNDING)
    limits = {"max_body_bytes": 100_000, "max_buffered_bytes": needed}
    assert settings(limits, http_workers=http_workers).buffered_bytes == needed
    expected = f"limits.max_buffered_bytes: expected at least {needed}, got {needed - 1}"
    with pytest.raises(ValidationError, match=re.escape(expected)):
        settings({**limits, "max_buffered_bytes": needed - 1}, http_workers=http_workers)
