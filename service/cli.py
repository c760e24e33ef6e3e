"""The `expertd` command."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from expertd import __version__
from expertd.backends import BACKENDS
from expertd.service.kernels_command import add_parser as add_kernels_parser

_FLAGS = ("host", "port", "backend", "log_level")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for anything wrong in what was asked."""
    arguments = _parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="expertd", description="A server for MoE expert layers.")
    parser.add_argument("--version", action="version", version=f"expertd {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = subparsers.add_parser("serve", help="serve the models of a configuration file, or a checkpoint")
    serve.add_argument("--config", type=Path, help="YAML file with the settings (else EXPERTD_CONFIG)")
    serve.add_argument(
        "--model", type=Path, help="checkpoint directory, whose layers are served and nothing else"
    )
    serve.add_argument("--layers", help="its MoE layers to serve, needed with --model: 3, 3-5 or 3-5,9")
    serve.add_argument("--experts", help="the routed experts to hold: 0-63 (else all)")
    serve.add_argument("--name", help="the layers are called NAME.layers.3 and so on (else as the directory)")
    serve.add_argument("--host", help="address to listen on")
    serve.add_argument("--port", help="port to listen on, 0 for any")
    serve.add_argument("--backend", help=f"auto, {' or '.join(BACKENDS)}")
    serve.add_argument("--log-level", help="debug, info, warning or error")
    serve.set_defaults(run=_serve)
    add_kernels_parser(subparsers)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    # Until uvicorn sets its own: the kernel ignores both signals for a process 1 without a handler, and a
    # container that is stopped while Python imports would wait for its time-out.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    # Here, not above: imports take most of the time in which a signal could come too early.
    from expertd.service.checkpoints import CheckpointError, resolve_checkpoints
    from expertd.service.settings.loader import SettingsError, default_config, load_settings

    try:
        path, served = arguments.config or default_config(), _checkpoint(arguments)
        settings = load_settings(path, {flag: getattr(arguments, flag) for flag in _FLAGS} | served)
        settings = resolve_checkpoints(settings)
    except (SettingsError, CheckpointError) as error:
        return _refuse(error)
    # After the settings: torch and the web server take seconds to import, and a wrong setting should not.
    from expertd.service.http.server import BindError, configure_logging, serve

    configure_logging(settings.log_level)
    try:
        return serve(settings)
    except BindError as error:
        return _refuse(error)


def _checkpoint(arguments: argparse.Namespace) -> dict[str, object]:
    """The settings that --model and its companions stand for. Raises SettingsError."""
    from expertd.service.settings.loader import SettingsError

    given = {flag: getattr(arguments, flag) for flag in ("layers", "experts", "name")}
    given = {flag: value for flag, value in given.items() if value is not None}
    if arguments.model is None:
        if given:
            raise SettingsError(f"--model is expected with --{next(iter(given))}, got none")
        return {}
    return {"models": [], "checkpoints": [{"path": arguments.model, **given}]}


def _leave(number: int, frame: FrameType | None) -> None:
    """End a server that has accepted nothing yet; at once, for an exception can be lost in an import."""
    os._exit(0)


def _refuse(error: Exception) -> int:
    print(f"expertd: {error}", file=sys.stderr)
    return 2
