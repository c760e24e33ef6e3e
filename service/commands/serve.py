"""`expertd serve`: reads the settings, makes the checks that need no torch, and serves."""

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
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser("serve", help="serve the models of a configuration file or a checkpoint")
    add_serve_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; return 0 after a full drain, else 1, or 2 for invalid settings."""
    # Used until uvicorn sets its own handlers. Without one, the kernel ignores these signals for process 1,
    # and stopping a container during imports would take the full stop timeout.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit_now)
    # Imported here so that the handlers above are set before these imports, which are slow.
    from expertd.service.checkpoints import resolve_checkpoints
    from expertd.service.settings.loader import SettingsError

    try:
        settings, _ = read_arguments(arguments)
        settings = resolve_checkpoints(settings)
        check_weights(settings)
    except SettingsError as error:
        return _refuse(*error.mistakes)
    except ValueError as error:
        return _refuse(error)
    from expertd.service.terminal import configure_logging

    configure_logging(settings.log_level)
    # Imported after the settings are read: these take seconds, and invalid settings should fail at once.
    if settings.node_rank > 0:
        os.putenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # else its store traces the stack when the front end ends
        from expertd.service.ranks.agent import run_agent

        return run_agent(settings)
    from expertd.service.http.listening import BindError
    from expertd.service.http.server import serve

    if settings.uds is None and (warning := exposure(settings.host, settings.port)) is not None:
        logger.warning(warning)
    try:
        if settings.num_ranks == 1:
            return serve(settings)
        from expertd.service.ranks.loading import load_ranks

        return serve(settings, load_ranks)
    except BindError as error:
        return _refuse(error)


def check_weights(settings: "Settings") -> None:
    """Raise ValueError if a weights file cannot be read or does not fit its layer. Reads only headers."""
    from expertd.service.moe.weights_file import check_weights_file

    for model in settings.models:
        if model.weights.path is not None:
            check_weights_file(model.weights.path, model.shape)


def exposure(host: str, port: int) -> str | None:
    """A warning if listening on `host` exposes the server beyond this machine, else None."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None  # listening on the address will fail with a better message
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        return None
    return (
        f"host {host} exposes port {port} beyond this machine without authentication or TLS: anyone who can "
        "reach it can run inference and replace SM partitions; listen on 127.0.0.1, or restrict access with "
        "a proxy or a firewall"
    )


def _exit_now(number: int, frame: FrameType | None) -> None:
    """Exit a server that has accepted nothing yet. Not by an exception: an import could swallow it."""
    os._exit(0)


def _refuse(*mistakes: object) -> int:
    for mistake in mistakes:
        print(f"expertd: {mistake}", file=sys.stderr)
    return 2
