"""`expertd serve`: reads settings, checks what can be checked without torch, and serves."""

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

from expertd.service.commands.arguments import add_serve_arguments, read_arguments

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command to `subparsers`."""
    parser = subparsers.add_parser("serve", help="serve the models of a configuration file, or a checkpoint")
    add_serve_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal: 0 after a full drain, else 1; 2 for settings that cannot be served."""
    # Until uvicorn sets its own: the kernel ignores these signals for a process 1 without a handler, and a
    # container that is stopped while Python imports would wait for its time-out.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, _leave)
    # Here, not above: imports take most of the time in which a signal could come too early.
    from expertd.service.checkpoints import resolve_checkpoints
    from expertd.service.settings.loader import SettingsError

    try:
        settings, _ = read_arguments(arguments)
        settings = resolve_checkpoints(settings)
        check_weights(settings)
    except (SettingsError, ValueError) as error:
        return _refuse(error)
    # After the settings: torch and the web server take seconds to import, and a wrong setting should not.
    from expertd.service.http.server import BindError, serve
    from expertd.service.terminal import configure_logging

    configure_logging(settings.log_level)
    if (warning := exposure(settings.host, settings.port)) is not None:
        logger.warning(warning)
    try:
        return serve(settings)
    except BindError as error:
        return _refuse(error)


def check_weights(settings: "Settings") -> None:
    """Raise ValueError for a weights file that cannot be read, or is not its layer's. Reads headers only."""
    from expertd.service.moe.weights_file import check_weights_file

    for model in settings.models:
        if model.weights.path is not None:
            check_weights_file(model.weights.path, model.shape)


def exposure(host: str, port: int) -> str | None:
    """What listening on `host` opens to others than this machine; None where that is nothing."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None  # the server will say what is wrong with the address
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        return None
    return (
        f"host {host} opens port {port} beyond this machine without authentication or TLS: anyone who can "
        "reach it can run inference and replace SM partitions; listen on 127.0.0.1, or put a proxy or a "
        "firewall in front that admits only the right callers"
    )


def _leave(number: int, frame: FrameType | None) -> None:
    """End a server that has accepted nothing yet; at once, for an exception can be lost in an import."""
    os._exit(0)


def _refuse(error: Exception) -> int:
    print(f"expertd: {error}", file=sys.stderr)
    return 2
