"""The sources of settings: a YAML file, the environment, and the command line."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from expertd.service.settings.fields import ENV_DELIMITER, ENV_PREFIX, Fields
from expertd.service.settings.schema import read
from expertd.service.settings.values import Key, SettingsError, Value, dotted
from expertd.service.settings.yaml_text import YamlTextError, parse
from expertd.service.util.files import read_text
from expertd.service.util.sentences import shown

NOT_SETTINGS = ("ca", "cache_dir", "config", "key")
"""Of other variables: the client reads CA and KEY, the kernel cache CACHE_DIR, `default_config` CONFIG."""
VARIABLE = "environment variable "
"""The beginning of the origin of a variable's value."""

# torchrun's variables and their settings; NODE_RANK overrides GROUP_RANK, as the one that people set
_TORCHRUN = {
    "NNODES": "nnodes",
    "GROUP_RANK": "node_rank",
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": None,
    "MASTER_PORT": None,
}
# Kubernetes sets such variables in every pod for a Service named "expertd".
_SERVICE_LINK = re.compile(rf"{ENV_PREFIX}(SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP).*)")


Override = tuple[Key, Value]
"""A value, and the key where it overrides that of earlier sources."""


class Flag(NamedTuple):
    """A flag as written on the command line, the dotted key it sets, and the value."""

    name: str
    key: str
    value: Any


def default_config() -> Path | None:
    """The path in EXPERTD_CONFIG, used if the command line has no --config; None if it is unset or empty."""
    value = os.environ.get(f"{ENV_PREFIX}CONFIG")
    return Path(value) if value else None


def variable_name(name: str) -> str:
    """The variable for a dotted name."""
    return f"{ENV_PREFIX}{name.replace('.', ENV_DELIMITER).upper()}"


def runtime_directory() -> Path | None:
    """The folder for sockets of this user's programs; None without a session that has one."""
    value = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(value) if value.startswith("/") else None


def from_file(path: Path) -> Value:
    """The settings in a YAML file. Raises SettingsError."""
    try:
        parsed = parse(read_text(path))
    except YamlTextError as error:
        place = str(path) if error.line is None else f"{path}:{error.line}"
        raise SettingsError(_sentence(place, error.key, error)) from error
    except ValueError as error:
        raise SettingsError(str(error)) from error
    values = {} if parsed.value is None else parsed.value  # None: an empty file
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: expected an object with names of settings, got {shown(values)}")
    for name in values:
        if not isinstance(name, str):
            place = f"{path}:{line}" if (line := parsed.lines.get((str(name),))) else f"{path}"
            raise SettingsError(f"{place}: expected the name of a setting, got {shown(name)}")

    def origin(key: Key) -> str:
        while key and key not in parsed.lines:  # merged by <<
            key = key[:-1]
        return f"{path}:{parsed.lines[key]}" if key else str(path)

    return Value.of(values, origin)._replace(origin=None)


def from_environment() -> list[Override]:
    """The settings in EXPERTD_... variables; nested keys come last and override. Raises SettingsError."""
    overrides = []
    seen: dict[str, str] = {}  # names that differ in case only stand for one setting
    for name, text in sorted(os.environ.items()):
        if (
            not name.startswith(ENV_PREFIX)
            or name in map(variable_name, NOT_SETTINGS)
            or _SERVICE_LINK.fullmatch(name)
        ):
            continue
        path = name.removeprefix(ENV_PREFIX).lower()
        key = tuple(path.split(ENV_DELIMITER))
        if not text and key[0] in Fields.model_fields:
            continue
        if key == ("port",) and text.startswith(("tcp://", "udp://")):  # also a service link
            continue
        if (other := seen.setdefault(path, name)) != name:
            raise SettingsError(f"environment: expected one of {other} and {name}, got both")
        overrides.append(_override(key, text, f"{VARIABLE}{name}"))
    return sorted(overrides, key=lambda override: len(override[0]))


def from_torchrun(of_file: Value, others: Sequence[Override]) -> Iterator[Override]:
    """The settings in variables with torchrun's names, if they or another source give the number of nodes.

    They override the file, and `others` override them.
    """
    variables = {name: text for name in _TORCHRUN if (text := os.environ.get(name))}
    counts = [of_file.content[name].plain for name in of_file.content if name == "nnodes"]
    counts += [text for name, text in variables.items() if name == "NNODES"]
    counts += [value.plain for key, value in others if key == ("nnodes",)]
    if not counts:
        return  # an environment of other programs
    for name, key in _TORCHRUN.items():
        if key and name in variables:
            yield _override((key,), variables[name], f"{VARIABLE}{name}")
    # torchrun sets them for one node, too, which meets nobody.
    if str(counts[-1]) != "1" and {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        place = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        yield _override(("rendezvous",), place, "environment variables MASTER_ADDR, MASTER_PORT")


def from_flags(flags: Sequence[Flag]) -> list[Override]:
    """The settings in flags, in the given order. Raises SettingsError."""
    return [_override(tuple(flag.key.split(".")), flag.value, f"flag {flag.name}") for flag in flags]


def _override(key: Key, value: Any, origin: str) -> Override:
    if isinstance(value, str):
        try:
            value = read(key, value)
        except YamlTextError as error:
            raise SettingsError(_sentence(origin, (*key, *error.key), error)) from error
    return key, Value.of(value, lambda _: origin)


def _sentence(origin: str, key: Key, error: Exception) -> str:
    return ": ".join(filter(None, (origin, dotted(key), str(error))))
