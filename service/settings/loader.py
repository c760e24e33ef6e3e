"""Loads settings: one YAML file, the environment over it, flags over that; one sentence on what is wrong."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource
from pydantic_settings.exceptions import SettingsError as EnvSettingsError

from expertd.service.sentences import expected_and_got, shown
from expertd.service.settings.model import (
    ENV_DELIMITER,
    ENV_PREFIX,
    CheckpointSettings,
    ModelSettings,
    Settings,
)

_LISTS: Mapping[int | str, type[BaseModel]] = {"models": ModelSettings, "checkpoints": CheckpointSettings}

# Read elsewhere (the kernel cache) or before the settings themselves (the file's place).
_OTHER_VARIABLES = {f"{ENV_PREFIX}CACHE_DIR", f"{ENV_PREFIX}CONFIG"}
# Kubernetes describes a Service called "expertd" to every pod in variables of this form.
_SERVICE_LINK = re.compile(rf"{ENV_PREFIX}(SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP).*)")


class SettingsError(Exception):
    """Settings that cannot be used; the text is one sentence for the person who wrote them."""


def default_config() -> Path | None:
    """The file named by EXPERTD_CONFIG, used when the command line names none."""
    value = os.environ.get(f"{ENV_PREFIX}CONFIG")
    return Path(value) if value else None


def load_settings(path: Path | None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from the YAML file at `path` (None: no file), EXPERTD_... over it, then `flags` (None: not
    given).

    Raises SettingsError naming the key, what was expected and what came.
    """
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    values = _merge(_merge(_read_yaml(path) if path else {}, _read_environment()), given)
    if path is None and not values.get("models") and not values.get("checkpoints"):
        raise SettingsError(
            "a configuration file is expected in --config or EXPERTD_CONFIG, or a checkpoint in --model, "
            "got neither"
        )
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError(_sentence(path, error, given)) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: expected YAML: {' '.join(str(error).split())}") from error
    if values is None:  # an empty file
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SettingsError(f"{path}: expected a mapping of setting names to values, got {shown(values)}")
    return values


def _read_environment() -> dict[str, Any]:
    for name in os.environ:
        if not name.startswith(ENV_PREFIX) or name in _OTHER_VARIABLES or _SERVICE_LINK.fullmatch(name):
            continue
        key = name.removeprefix(ENV_PREFIX).split(ENV_DELIMITER)[0].lower()
        if key not in Settings.model_fields:
            raise SettingsError(f"environment: {name}: unknown setting; known: {_known(Settings)}")
    try:
        values = EnvSettingsSource(Settings)()
    except EnvSettingsError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        raise SettingsError(f"environment: {error}{cause}") from error
    if str(values.get("port", "")).startswith(("tcp://", "udp://")):
        del values["port"]  # a service link, too
    return values


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _sentence(path: Path | None, error: ValidationError, flags: Mapping[str, Any]) -> str:
    details = error.errors(include_url=False)
    # A misspelt key is why another is missing.
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"unknown setting; known: {_known(_owner(first['loc']))}"
    else:
        text = expected_and_got(first)
    origin = _origin(path, where, flags)
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{origin}: {where}: {text}{more}" if where else f"{origin}: {text}{more}"


def _origin(path: Path | None, where: str, flags: Mapping[str, Any]) -> str:
    """What gave the value at `where` (a dotted key): a flag, else a variable, else the file."""
    variable = ENV_PREFIX + where.replace(".", ENV_DELIMITER).upper()
    over = "" if path is None else f" over {path}"
    if where.split(".")[0] in flags:
        flag = where.split(".")[-1].replace("_", "-")
        return f"flag --{'model' if flag == 'path' else flag}{over}"
    if variable in os.environ:
        return f"environment variable {variable}{over}"
    if within := sorted(name for name in os.environ if where and name.startswith(variable + ENV_DELIMITER)):
        return f"environment variable {', '.join(within)}{over}"  # the parts of what is wrong as a whole
    return "command line" if path is None else str(path)


def _owner(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The settings class that was asked for the last key of `loc`."""
    owner: type[BaseModel] = Settings
    for part in loc[:-1]:
        if part in _LISTS:
            owner = _LISTS[part]
        elif isinstance(part, str):
            annotation = owner.model_fields[part].annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                owner = annotation
    return owner


def _known(owner: type[BaseModel]) -> str:
    return ", ".join(owner.model_fields)
