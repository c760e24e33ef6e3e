"""The sources of settings: a YAML file, the environment, and the command line."""

import os
import re
from collections.abc import Sequence
from functools import partial, reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from expertd.service.settings.model import ENV_DELIMITER, ENV_PREFIX, Settings
from expertd.service.settings.rendezvous import TORCHRUN, torchrun_assignments
from expertd.service.settings.values import Assignment, Key, SettingsError, dotted
from expertd.service.settings.variables import VariableSource
from expertd.service.settings.yaml_text import YamlTextError, parse
from expertd.service.util.files import read_text
from expertd.service.util.sentences import shown

NOT_SETTINGS = ("ca", "cache_dir", "config", "key")
"""Of other variables: the client reads CA and KEY, the kernel cache CACHE_DIR, `default_config` CONFIG."""
VARIABLE = "environment variable "
"""The beginning of the origin of a variable's value."""

# Kubernetes sets such variables in every pod for a Service named "expertd".
_SERVICE_LINK = re.compile(rf"{ENV_PREFIX}(SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP).*)")


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


def from_file(path: Path) -> list[Assignment]:
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

    return [Assignment((name,), value, origin) for name, value in values.items()]


def from_environment() -> list[Assignment]:
    """The settings in EXPERTD_... variables; nested keys come last and override. Raises SettingsError."""
    source, assignments = VariableSource(Settings), []
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
        if not text and key[0] in Settings.model_fields:
            continue
        if key == ("port",) and text.startswith(("tcp://", "udp://")):  # also a service link
            continue
        if (other := seen.setdefault(path, name)) != name:
            raise SettingsError(f"environment: expected one of {other} and {name}, got both")
        assignments.append(_read(source, f"{ENV_PREFIX}{path}", key, text, f"{VARIABLE}{name}"))
    return sorted(assignments, key=lambda assignment: len(assignment.key))


def from_torchrun(of_file: Sequence[Assignment], others: Sequence[Assignment]) -> list[Assignment]:
    """The settings in variables with torchrun's names, if they or another source give the number of nodes.

    They override the file, and `others` override them.
    """
    found = {name: text for name in TORCHRUN if (text := os.environ.get(name))}
    counts = [[each.value for each in source if each.key == ("nnodes",)] for source in (of_file, others)]
    counts.insert(1, [found["NNODES"]] if "NNODES" in found else [])
    given = [*chain(*counts)]
    if not given:
        return []  # an environment of other programs
    if str(given[-1]) == "1":
        found.pop("MASTER_ADDR", None)  # torchrun sets it for one node, too, which meets nobody
    return torchrun_assignments(found)


def from_flags(flags: Sequence[Flag]) -> list[Assignment]:
    """The settings in flags, in the given order. Raises SettingsError."""
    source = VariableSource(Settings, env_prefix="", env_nested_delimiter=".")
    assignments = []
    for name, path, value in flags:
        key, origin = tuple(path.split(".")), f"flag {name}"
        if isinstance(value, str):
            assignments.append(_read(source, path, key, value, origin))
        else:
            assignments.append(Assignment(key, value, partial(_always, origin)))
    return assignments


def _read(source: VariableSource, name: str, key: Key, text: str, origin: str) -> Assignment:
    try:
        tree = source.read(name, text)
    except YamlTextError as error:
        raise SettingsError(_sentence(origin, (*key, *error.key), error)) from error
    value = reduce(getitem, key, tree) if tree else text  # empty: unknown, or null; both are refused later
    return Assignment(key, value, partial(_always, origin))


def _always(origin: str, _: Key) -> str:
    return origin


def _sentence(origin: str, key: Key, error: Exception) -> str:
    return ": ".join(filter(None, (origin, dotted(key), str(error))))
