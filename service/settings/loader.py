"""Loads settings: flags override the environment, which overrides one YAML file. Errors are sentences."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from expertd.service.settings.errors import sentences
from expertd.service.settings.model import Settings
from expertd.service.settings.sources import (
    Flag,
    default_config,
    from_environment,
    from_file,
    from_flags,
    from_torchrun,
)
from expertd.service.settings.values import SettingsError, Value

__all__ = ["Flag", "SettingsError", "default_config", "load_settings", "read_settings", "serves_demo"]


DEMO = Path(__file__).with_name("demo.yaml")


def load_settings(path: Path | None, flags: Sequence[Flag] = ()) -> Settings:
    """Load settings from the YAML file at `path` (None: no file), EXPERTD_... variables, and `flags`.

    Without a file, and without models or checkpoints elsewhere, they have the layer of `DEMO`.
    Later sources and flags override earlier ones; torchrun's variables come after the file. Raises
    SettingsError with the origin, the key, the expected value and the actual one of each mistake.
    """
    return read_settings(path, flags)[0]


def serves_demo(values: Value) -> bool:
    """Whether the layer to serve is that of `DEMO`, because nothing else was said."""
    return any(origin.startswith(f"{DEMO}:") for origin in values.origins(("models",)))


def read_settings(path: Path | None, flags: Sequence[Flag] = ()) -> tuple[Settings, Value]:
    """Load settings as `load_settings` does; also return the given values, which know their origins."""
    values = from_file(path) if path else Value({}, None)
    others = [*from_environment(), *from_flags(flags)]
    for key, value in (*from_torchrun(values, others), *others):
        values = values.put(key, value)
    if path is None and not any(values.plain.get(name) for name in ("models", "checkpoints")):
        values = values.put(("models",), from_file(DEMO).content["models"])
    try:
        return Settings.model_validate(values.plain), values
    except ValidationError as error:
        raise SettingsError(*sentences(error, values, str(path or "settings"))) from error
