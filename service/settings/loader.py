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
from expertd.service.settings.values import SettingsError, Values

__all__ = ["Flag", "SettingsError", "default_config", "load_settings", "read_settings"]


def load_settings(path: Path | None, flags: Sequence[Flag] = ()) -> Settings:
    """Load settings from the YAML file at `path` (None: no file), EXPERTD_... variables, and `flags`.

    Later sources and flags override earlier ones; torchrun's variables come after the file. Raises
    SettingsError with the origin, the key, the expected value and the actual one of each mistake.
    """
    return read_settings(path, flags)[0]


def read_settings(path: Path | None, flags: Sequence[Flag] = ()) -> tuple[Settings, Values]:
    """Load settings as `load_settings` does; also return the given values, which know their origins."""
    values = Values()
    of_file, others = from_file(path) if path else [], [*from_environment(), *from_flags(flags)]
    for assignment in (*of_file, *from_torchrun(of_file, others), *others):
        values.put(assignment)
    if path is None and not values.tree.get("models") and not values.tree.get("checkpoints"):
        raise SettingsError(
            "config: expected a file in --config or EXPERTD_CONFIG, or a checkpoint in --model, got neither"
        )
    try:
        return Settings.model_validate(values.tree), values
    except ValidationError as error:
        raise SettingsError(*sentences(error, values, str(path or "settings"))) from error
