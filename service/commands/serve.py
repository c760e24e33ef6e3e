"""`expertd serve`: reads the settings, makes the checks that need no torch, and serves."""

import argparse
import logging
import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING

from expertd.service.commands.arguments import add_serve_arguments, demo_remark, read_arguments
from expertd.service.commands.cpus import prepare_openmp
from expertd.service.commands.devices import capabilities_of, check_before_listening
from expertd.service.util.files import UnwritableError
from expertd.service.util.heap import quick_imports

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Callable

    from expertd.service.http.app import ExpertApp, SideServer
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
        settings, values = read_arguments(arguments)
        settings = resolve_checkpoints(settings, capabilities_of)
        check_weights(settings)
        check_grpc(settings)
        check_tracing(settings)
        check_nixl(settings)
        check_rendezvous(settings)
        if settings.node_rank == 0:
            check_keys(settings)
            remark, is_valid = check_tls(settings)
    except SettingsError as error:
        return _refuse(*error.mistakes)
    except ValueError as error:
        return _refuse(error)
    from expertd.service.util.heap import share_heap
    from expertd.service.util.logs import configure_logging

    configure_logging(settings.log_level, form=settings.log_format)
    if remark_on_demo := demo_remark(values):
        logger.warning(remark_on_demo)
    share_heap()
    prepare_openmp(settings)
    # Imported after the settings are read: these take seconds, and invalid settings should fail at once.
    if settings.node_rank > 0:
        os.putenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # else its store traces the stack when the front end ends
        with quick_imports():
            from expertd.service.ranks.nodes.agent import run_agent

        try:
            check_before_listening(settings)
            check_memory(settings)
        except (MemoryError, ValueError, RuntimeError) as error:
            return _refuse(error)
        return run_agent(settings)
    with quick_imports():
        from expertd.service.http.listening import BindError
        from expertd.service.http.server import serve

    try:
        check_before_listening(settings)
    except (ValueError, RuntimeError, UnwritableError) as error:
        return _refuse(error)
    try:
        if not is_valid:
            logger.warning("tls: %s", remark)
        if (warning := exposure(settings)) is not None:
            logger.warning(warning)
        check_memory(settings)
        side_server = _grpc_server(settings)
        if settings.num_ranks == 1:
            return serve(settings, make_side_server=side_server)
        from expertd.service.ranks.front.loading import load_ranks

        return serve(settings, load_ranks, side_server)
    except (BindError, MemoryError) as error:
        return _refuse(error)
    except SettingsError as error:  # the file of keys, or those of TLS, have changed since
        return _refuse(*error.mistakes)


def check_weights(settings: "Settings") -> None:
    """Raise ValueError if a weights file cannot be read or does not fit its layer. Reads only headers."""
    from expertd.service.moe.weights_file import check_weights_file

    for model in settings.models:
        if model.weights.path is not None:
            check_weights_file(model.weights.path, model.stored_shape)


def check_memory(settings: "Settings") -> None:
    """Raise MemoryError if layers do not fit in the memory of the devices that they are for, or what a GPU
    needs of the host's does not fit there. Logs a warning if callers could use more of that than is free.
    """
    from expertd.service.commands.host_memory import check_host_memory
    from expertd.service.ranks.shares import check_device_memory

    capabilities = capabilities_of(settings)
    if capabilities is None:
        return  # loading says why
    check_device_memory(settings, capabilities)
    check = check_host_memory(settings, capabilities)
    if settings.node_rank == 0 and (warning := check.warning) is not None:
        logger.warning(warning)


def check_keys(settings: "Settings") -> str:
    """What the file of keys has. Raises SettingsError if it cannot be used."""
    from expertd.service.settings.keys import load_keys

    if settings.keys is None:
        return "none"
    return f"{len(load_keys(settings.keys).keys)} in {settings.keys}"


def check_tls(settings: "Settings") -> tuple[str, bool]:
    """How long the server's certificate is valid, and whether it is for now. Raises SettingsError."""
    from expertd.service.settings.certificates import validity

    return validity(settings.tls) if settings.tls.is_on else ("none", True)


def check_rendezvous(settings: "Settings") -> None:
    """Raise ValueError if nodes may not meet there, or cannot, because the server itself listens there."""
    from expertd.service.ranks.rendezvous import between_nodes, check_exposure
    from expertd.service.settings.rendezvous import host_and_port

    check_exposure(settings)
    if settings.rendezvous is None or settings.node_rank > 0:
        return
    port = host_and_port(settings.rendezvous)[1]
    if port == settings.grpc.port or (settings.uds is None and port == settings.port):
        # Only then: a network that is not there yet is no mistake of the settings.
        between_nodes(settings.model_copy(update={"uds": None, "port": port}))


def exposure(settings: "Settings") -> str | None:
    """A warning if the server is exposed beyond this machine, else None."""
    from expertd.service.http.listening import is_exposed

    host = settings.host
    port = settings.port if settings.uds is None else settings.grpc.port
    if port is None or not is_exposed(host):
        return None
    beyond = f"host {host} exposes port {port} beyond this machine without"
    if settings.keys is not None:
        if settings.tls.is_on:
            return None
        return (
            f"{beyond} TLS: anyone who reads the traffic has the keys; set tls.certificate and tls.key, or "
            "use a network of trusted hosts, or a proxy with TLS"
        )
    if not settings.insecure:
        return None  # refused
    missing = "keys" if settings.tls.is_on else "authentication or TLS"
    whoever = "anyone who can reach it"
    if settings.tls.client_ca is not None:
        whoever = "anyone with a client certificate"
    return (
        f"{beyond} {missing}: {whoever} can run inference and replace SM partitions; set keys, or restrict "
        "access with a proxy or a firewall"
    )


def check_grpc(settings: "Settings") -> None:
    """Raise ValueError if gRPC is on and a package of it is not installed."""
    packages = {"grpc": "grpcio", "grpc_health": "grpcio-health-checking"}
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if settings.grpc.port is not None and missing:
        expected = "the packages of expertd[grpc] (pip install 'expertd[grpc]')"
        raise ValueError(f"grpc.port: expected {expected}, got no {missing[0]}")


def check_nixl(settings: "Settings") -> None:
    """Raise ValueError if channels over NIXL are on and its package is not installed."""
    if settings.channels.nixl and find_spec("nixl_cu13") is None:
        expected = "the packages of expertd[nixl] (pip install 'expertd[nixl]')"
        raise ValueError(f"channels.nixl: expected {expected}, got no nixl-cu13")


def check_tracing(settings: "Settings") -> None:
    """Raise ValueError if spans are to be sent and OpenTelemetry's packages are not installed."""
    if settings.tracing.endpoint is None:
        return
    from expertd.service.tracing import is_installed

    if not is_installed():
        expected = "the packages of expertd[otel] (pip install 'expertd[otel]')"
        raise ValueError(f"tracing.endpoint: expected {expected}, got no OTLP exporter")


def _grpc_server(settings: "Settings") -> "Callable[[ExpertApp, Settings], SideServer] | None":
    """What makes the gRPC server; None without one, and then nothing of it is imported."""
    if settings.grpc.port is None:
        return None
    from expertd.service.grpc.server import GrpcServer

    return GrpcServer


def _exit_now(number: int, frame: FrameType | None) -> None:
    """Exit a server that has accepted nothing yet. Not by an exception: an import could swallow it."""
    os._exit(0)


def _refuse(*mistakes: object) -> int:
    for mistake in mistakes:
        print(f"expertd: {mistake}", file=sys.stderr)
    return 2
