"""The arguments that `serve` and `check` share."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.backends import BACKENDS

if TYPE_CHECKING:
    from expertd.service.settings.loader import Flag
    from expertd.service.settings.model import Settings
    from expertd.service.settings.values import Value

_NODES = ("nnodes", "node_rank", "rendezvous")
_COMMON = ("host", "port", "uds", "http_workers", "backend", "devices", "ranks", *_NODES, "log_level", "keys")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that configure a server."""
    parser.add_argument(
        "--config", type=Path, help="YAML file with the settings (default: EXPERTD_CONFIG, or a demo layer)"
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory; only its layers are served")
    parser.add_argument("--layers", help="MoE layers to serve, such as 3 or 3-5,9 (default: all)")
    parser.add_argument("--experts", help="routed experts to hold, such as 0-63 (default: all)")
    parser.add_argument("--shared-experts", help="false: leave them to the callers (default: true)")
    parser.add_argument(
        "--requantize", help="allow: round other encodings to FP8; always: four bits, too (default: refuse)"
    )
    parser.add_argument("--name", help="name layers NAME.layers.3 and so on (default: the directory's name)")
    parser.add_argument("--host", help="address to listen on (default: loopback only)")
    parser.add_argument("--port", help="port to listen on; 0: any free one")
    parser.add_argument("--uds", help="path of a Unix socket to listen on, instead of host and port")
    parser.add_argument("--http-workers", help="number of processes that speak HTTP (default: 1)")
    parser.add_argument("--backend", help=f"auto, {' or '.join(BACKENDS)}")
    parser.add_argument("--devices", help="GPUs that share every layer, such as 0-1 (default: one)")
    parser.add_argument("--ranks", help="number of processes that share every layer on the CPU (default: 1)")
    parser.add_argument("--nnodes", help="number of nodes with as many ranks each (default: 1)")
    parser.add_argument("--node-rank", help="number of this node; 0 has the front end (default: 0)")
    parser.add_argument("--rendezvous", help="HOST:PORT of node 0, where the nodes meet")
    parser.add_argument("--keys", help="YAML file with the API keys (default: everybody may call)")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="listen beyond loopback without --keys"
    )
    parser.add_argument("--log-level", help="debug, info, warning or error")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of docs/settings.md, can be repeated: --set limits.max_batch_tokens=8192, "
        "--set models.0.partition=compute, --set 'partitions={compute: 112}'",
    )


def demo_remark(values: "Value") -> str:
    """Says that a demo layer is served, if so."""
    from expertd.service.settings.loader import serves_demo

    return "no --model or --config: serving a demo layer of random weights" if serves_demo(values) else ""


def read_arguments(arguments: argparse.Namespace) -> tuple["Settings", "Value"]:
    """The settings from the arguments, the environment and the file. Raises SettingsError."""
    from expertd.service.settings.loader import default_config, read_settings

    return read_settings(arguments.config or default_config(), flags_of(arguments))


def flags_of(arguments: argparse.Namespace) -> list["Flag"]:
    """The given flags; --set comes last and so overrides the others. Raises SettingsError."""
    from expertd.service.settings.loader import Flag, SettingsError

    flags = _checkpoint(arguments)
    for name in _COMMON:
        if (value := getattr(arguments, name)) is not None:
            flags.append(Flag(_flag(name), name, value))
    if arguments.insecure:
        flags.append(Flag("--insecure", "insecure", True))
    for text in arguments.set:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise SettingsError(f"flag --set: expected KEY=VALUE, got {text!a:.80}")
        flags.append(Flag(f"--set {key:.60}", key, value))
    return flags


def _checkpoint(arguments: argparse.Namespace) -> list["Flag"]:
    """The settings equivalent to --model, --layers and those that go with them. Raises SettingsError."""
    from expertd.service.settings.loader import Flag, SettingsError

    names = "layers", "experts", "shared_experts", "requantize", "name"
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.model is None:
        if given:
            raise SettingsError(f"model: expected --model with {_flag(next(iter(given)))}, got none")
        return []
    served = [Flag("--model", "models", []), Flag("--model", "checkpoints", [{"path": arguments.model}])]
    return served + [Flag(_flag(name), f"checkpoints.0.{name}", value) for name, value in given.items()]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
