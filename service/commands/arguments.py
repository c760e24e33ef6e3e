"""The arguments of `serve`, and of `check`, which takes the same ones."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.backends import BACKENDS

if TYPE_CHECKING:
    from expertd.service.settings.loader import Flag
    from expertd.service.settings.model import Settings
    from expertd.service.settings.values import Values

_COMMON = ("host", "port", "backend", "log_level")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be said of a server on the command line."""
    parser.add_argument("--config", type=Path, help="YAML file with the settings (else EXPERTD_CONFIG)")
    parser.add_argument(
        "--model", type=Path, help="checkpoint directory, whose layers are served and nothing else"
    )
    parser.add_argument("--layers", help="its MoE layers to serve, needed with --model: 3, 3-5,9 or all")
    parser.add_argument("--experts", help="the routed experts to hold: 0-63 (else all)")
    parser.add_argument("--name", help="layers are called NAME.layers.3 and so on (else as the directory)")
    parser.add_argument("--host", help="address to listen on (else this machine's alone)")
    parser.add_argument("--port", help="port to listen on, 0 for any")
    parser.add_argument("--backend", help=f"auto, {' or '.join(BACKENDS)}")
    parser.add_argument("--log-level", help="debug, info, warning or error")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of docs/settings.md, as often as needed: --set limits.max_batch_tokens=8192, "
        "--set models.0.partition=compute, --set 'partitions={compute: 112}'",
    )


def read_arguments(arguments: argparse.Namespace) -> tuple["Settings", "Values"]:
    """The settings that the arguments, the environment and the file give. Raises SettingsError."""
    from expertd.service.settings.loader import default_config, read_settings

    return read_settings(arguments.config or default_config(), flags_of(arguments))


def flags_of(arguments: argparse.Namespace) -> list["Flag"]:
    """The flags that were given; --set has the last word. Raises SettingsError."""
    from expertd.service.settings.loader import Flag, SettingsError

    flags = _checkpoint(arguments)
    for name in _COMMON:
        if (value := getattr(arguments, name)) is not None:
            flags.append(Flag(f"--{name.replace('_', '-')}", name, value))
    for text in arguments.set:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise SettingsError(f"flag --set: expected KEY=VALUE, got {text!a:.80}")
        flags.append(Flag(f"--set {key:.60}", key, value))
    return flags


def _checkpoint(arguments: argparse.Namespace) -> list["Flag"]:
    """The settings that --model and its companions stand for. Raises SettingsError."""
    from expertd.service.settings.loader import Flag, SettingsError

    given = {name: getattr(arguments, name) for name in ("layers", "experts", "name")}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.model is None:
        if given:
            raise SettingsError(f"model: expected --model with --{next(iter(given))}, got none")
        return []
    if "layers" not in given:
        raise SettingsError("layers: expected --layers with --model, as in 3, 3-5,9 or all, got none")
    served = [Flag("--model", "models", []), Flag("--model", "checkpoints", [{"path": arguments.model}])]
    return served + [Flag(f"--{name}", f"checkpoints.0.{name}", value) for name, value in given.items()]
