"""Flags and variables are texts: each setting takes its default as one."""

import json
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from expertd.service.settings.loader import Flag, SettingsError, load_settings
from expertd.service.settings.model import Settings
from expertd.service.settings.schema import model_at

MODEL = {"name": "m", "hidden_size": 256, "intermediate_size": 128, "num_experts": 4, "top_k": 2}
CHECKPOINT = {"path": "/nowhere", "layers": "3"}
BASES = {"models": MODEL, "checkpoints": CHECKPOINT}


def texts(value: object, key: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The key and text of each setting in `value`, defaults among them; none for null."""
    if isinstance(value, dict) and (model_at(key) is not None or not key):
        for name, item in value.items():
            yield from texts(item, (*key, name))
    elif isinstance(value, list) and model_at((*key, "0")) is not None:
        for number, item in enumerate(value):
            yield from texts(item, (*key, str(number)))
    elif value is not None:
        yield ".".join(key), value if isinstance(value, str) else json.dumps(value)


def defaults() -> Settings:
    return Settings.model_validate({"models": [MODEL], "checkpoints": [CHECKPOINT]})


ALL = dict(texts(defaults().model_dump(mode="json")))


def read(settings: BaseModel) -> dict[str, object]:
    values: dict[str, object] = {}
    for key in ALL:
        value: object = settings
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
        values[key] = value
    return values


def test_flags_and_variables_take_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"port", "models.0.routing.renormalize", "partitions", "checkpoints.0.weight"} <= ALL.keys()
    flags = [Flag("--set", kind, [base]) for kind, base in BASES.items()]
    loaded = load_settings(None, [*flags, *(Flag(f"--set {key}", key, text) for key, text in ALL.items())])
    assert read(loaded) == read(defaults())
    for kind, base in BASES.items():
        monkeypatch.setenv(f"EXPERTD_{kind.upper()}", json.dumps([base]))
    for key, text in ALL.items():
        monkeypatch.setenv(f"EXPERTD_{key.upper().replace('.', '__')}", text)
    assert read(load_settings(None)) == read(defaults())


def test_a_number_of_a_choice_is_taken_as_text() -> None:
    flag = Flag("--set", "limits.queue_full_status", "429")
    assert load_settings(None, [Flag("--set", "models", [MODEL]), flag]).limits.queue_full_status == 429


@pytest.mark.parametrize("text", ["430", "4.29e2", "", "true"])
def test_a_number_outside_a_choice_is_refused(text: str) -> None:
    flags = [Flag("--set", "models", [MODEL]), Flag("--set x", "limits.queue_full_status", text)]
    with pytest.raises(SettingsError, match=rf"expected 429 or 503, got '{text}'"):
        load_settings(None, flags)
