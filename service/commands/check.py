"""`expertd check`: the effective settings, the origin of each, and whether a server would start."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from expertd.backends import BACKENDS, Capabilities
from expertd.service.commands.arguments import add_serve_arguments, demo_remark, read_arguments
from expertd.service.commands.cpus import check_cpus, prepare_openmp
from expertd.service.commands.devices import capabilities_of, check_backend, check_partitions, check_sockets
from expertd.service.commands.serve import (
    check_grpc,
    check_keys,
    check_nixl,
    check_rendezvous,
    check_tls,
    check_tracing,
    check_weights,
    exposure,
)
from expertd.service.util.files import UnwritableError, temporary_directory

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from expertd.service.settings.model import Settings
    from expertd.service.settings.values import Value

_ON_NODE_0 = "none: node 0 has the front end"


@dataclass(frozen=True)
class SettingRow:
    """A setting: its dotted key, its value as in JSON, and its origin or "default"."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `detail` is the error, a remark, or empty.

    ok  None: not checked, because of what another check found
    """

    name: str
    ok: bool | None
    detail: str = ""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "check",
        help="print the effective settings, and whether serve would start with them",
        description="Print the effective settings, the origin of each, and whether `expertd serve` would "
        "start with the same arguments. Loads no weights and does not change the GPU.",
    )
    add_serve_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="print the verdict, then only settings that differ from defaults",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 0 if the server would start, else 2."""
    from expertd.service.settings.loader import SettingsError
    from expertd.service.settings.schema import default_at

    rows: list[SettingRow] = []
    try:
        settings, values = read_arguments(arguments)
    except SettingsError as error:
        results = [CheckResult("settings", False, mistake) for mistake in error.mistakes]
    else:
        prepare_openmp(settings)
        rows = list(_rows(settings.model_dump(mode="json"), values, ()))
        if arguments.changed:
            rows = [row for row in rows if row.value != default_at(tuple(row.key.split(".")))]
        results = [CheckResult("settings", True, demo_remark(values)), *_checks(settings)]
    would_start = all(result.ok for result in results)
    if arguments.json:
        about = {"would_start": would_start, "settings": rows, "checks": results}
        print(json.dumps(about, indent=2, default=asdict))
    else:
        if arguments.changed:
            wrong = ", ".join(dict.fromkeys(result.name for result in results if not result.ok))
            print(f"the server would {f'not start: {wrong}' if wrong else 'start'}\n")
        _print_tables(rows, results)
        if not (would_start or arguments.changed):
            print("expertd check: the server would not start", file=sys.stderr)
    return 0 if would_start else 2


def _rows(value: Any, values: "Value", key: tuple[str, ...]) -> Iterator[SettingRow]:
    if value and isinstance(value, dict):
        for name, item in value.items():
            yield from _rows(item, values, (*key, name))
    elif value and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _rows(item, values, (*key, str(number)))
    else:
        origins = list(dict.fromkeys(values.origins(key)))
        yield SettingRow(".".join(key), value, ", ".join(origins) or "default")


def _checks(settings: "Settings") -> Iterator[CheckResult]:
    from expertd.service.checkpoints import resolve_checkpoints

    def checkpoints() -> str:
        nonlocal settings
        read = " (only headers are read)" if settings.checkpoints else ""
        settings = resolve_checkpoints(settings, capabilities_of)
        return f"layers to serve: {', '.join(model.name for model in settings.models)}{read}"

    yield (resolved := _result("checkpoints", checkpoints))
    has_slots = True
    for name, check, only_on_node_0 in _CHECKS:
        if only_on_node_0 and settings.node_rank > 0:
            yield CheckResult(name, True, _ON_NODE_0)
        else:
            yield (result := _result(name, partial(check, settings)))
            has_slots &= bool(result.ok) or check is not _expert_store
    if resolved.ok and has_slots:
        yield from _memory(settings)
    else:
        unknown = "not known without the checkpoints' layers"
        if resolved.ok:
            unknown = "not known without another weights_budget"
        yield from (CheckResult(name, None, unknown) for name in ("memory", "host memory"))


def _memory(settings: "Settings") -> Iterator[CheckResult]:
    """What each device of this node holds, and the host, and whether it fits."""
    from expertd.service.ranks.shares import shares_here, size, what_would_do

    capabilities = _capabilities(settings)
    for rank, share, available in shares_here(settings, capabilities):
        name = f"memory, rank {rank}" if settings.num_ranks > 1 else "memory"
        fits = available is None or share.num_bytes <= available
        left = "" if available is None else f"; {size(available)} are free"
        hint = "" if fits else what_would_do(settings, capabilities, available or 0)
        yield CheckResult(name, fits, share.text + left + hint)
    yield _result("host memory", lambda: _host_memory(settings, capabilities))


def _host_memory(settings: "Settings", capabilities: Capabilities) -> str:
    from expertd.service.commands.host_memory import check_host_memory
    from expertd.service.ranks.shares import size

    if settings.node_rank > 0:
        return _ON_NODE_0
    memory = check_host_memory(settings, capabilities)
    if memory.warning is not None:
        return f"warning: {memory.warning}"
    return f"{memory.text}; {size(memory.free)} are free"


def _result(name: str, check: Callable[[], str | None]) -> CheckResult:
    from expertd.service.http.listening import BindError
    from expertd.service.settings.values import SettingsError

    try:
        return CheckResult(name, True, check() or "")
    except SettingsError as error:
        return CheckResult(name, False, "; ".join(error.mistakes))
    except (BindError, ValueError, RuntimeError, OSError, MemoryError) as error:
        return CheckResult(name, False, str(error))


def _rendezvous(settings: "Settings") -> str:
    from expertd.service.ranks.rendezvous import between_nodes, listen
    from expertd.service.ranks.rendezvous import exposure as exposure_of_nodes

    if settings.nnodes == 1:
        return "none"
    check_rendezvous(settings)
    rendezvous = between_nodes(settings)
    if settings.node_rank > 0:
        return f"{settings.rendezvous}, from {rendezvous.address} on {rendezvous.interface}"
    listen(rendezvous.host, rendezvous.port).close()
    return exposure_of_nodes(rendezvous) or f"{settings.rendezvous} is free"


def _address(settings: "Settings") -> str:
    from expertd.service.http.listening import listen

    listen(settings).close()
    if settings.uds is not None:
        return f"{settings.uds} is free"
    return exposure(settings) or f"{settings.host}:{settings.port} is free"


def _grpc(settings: "Settings") -> str:
    check_grpc(settings)  # on every node, like serve
    if settings.grpc.port is None:
        return "none"
    if settings.node_rank > 0:
        return _ON_NODE_0
    from expertd.service.grpc.address import check_address

    return f"{check_address(settings)} is free"


def _tracing(settings: "Settings") -> str:
    check_tracing(settings)
    return settings.tracing.endpoint or "none"


def _tls(settings: "Settings") -> str:
    remark, is_valid = check_tls(settings)
    return remark if is_valid else f"warning: {remark}"


def _channels(settings: "Settings") -> str:
    from expertd.service.http.listening import NoChannelsError, listen_for_channels

    check_nixl(settings)
    try:
        listener = listen_for_channels(settings, settings.port)
    except NoChannelsError as error:
        return f"warning: {error}"
    if listener is None:
        return "none" if settings.channels.socket is None else "none: auto is for a host on loopback"
    listener.remove()
    group = settings.channels.group
    return f"{listener.path} is free" if group is None else f"{listener.path} is free, and for group {group}"


def _temporary_folder(settings: "Settings") -> str:
    from expertd.service.http.listening import engine_socket

    check_sockets(settings)
    if settings.http_workers > 1 and settings.node_rank == 0:
        with engine_socket():
            pass
    try:
        return str(temporary_directory("profiles"))
    except UnwritableError as error:
        return f"warning: {error}"


def _expert_store(settings: "Settings") -> str:
    """What steps of a token can expect of `weights_budget`, by arithmetic."""
    from expertd.service.engine.memory_needs import check_expert_slots, expert_slots
    from expertd.service.moe.expert_budget import COPY_RATES, ROUTINGS, copies_of_token
    from expertd.service.moe.needs import stored_shape
    from expertd.service.ranks.shares import size

    check_expert_slots(settings, capabilities := _capabilities(settings))
    if not (slots := expert_slots(settings, capabilities)):
        return "none: all experts fit into weights_budget" if settings.has_budget else "none"
    shapes = {model.name: stored_shape(model.shape, capabilities) for model in settings.models}
    ranks = settings.num_ranks
    held = {name: len(shapes[name].held_experts) for name in slots}
    replicas = settings.placement.replicas  # take the slots of others
    slots = {name: ranks * number * held[name] // (held[name] + replicas) for name, number in slots.items()}
    texts = []
    for law, exponent in ROUTINGS.items():
        hits, missed = copies_of_token(shapes, slots, exponent)
        rates = {link: ranks * rate / missed for link, rate in COPY_RATES.items()}
        speeds = ", ".join(f"{rate:.0f} tokens/s by {link}" for link, rate in rates.items())
        texts.append(f"{law} routing: hits {hits:.0%}, {size(int(missed))} to copy for a token: {speeds}")
    where = "the device" if ranks == 1 else f"the {ranks} ranks' devices"
    on_device = f"{sum(slots.values())} of {sum(held.values())} experts on {where}"
    at_once = "" if ranks == 1 else " that all ranks share evenly"
    return f"{on_device}; by copies alone{at_once}, one token at a time, {'; '.join(texts)}"


def _cpus(settings: "Settings") -> str:
    return check_cpus(settings, _capabilities(settings))


def _kernel_cache(settings: "Settings") -> str:
    if not _capabilities(settings).compiles:
        return "none"
    from expertd.kernels.jit import cache_directory, check_writable

    directory = cache_directory()
    try:
        check_writable(directory)
    except OSError as error:
        return f"warning: {error}: what is compiled at a start is not kept for the next one"
    return str(directory)


def _capabilities(settings: "Settings") -> Capabilities:
    """Also of a backend that cannot run here, as another check says: the plan is for other machines, too."""
    return capabilities_of(settings) or BACKENDS[settings.backend]


# As serve makes them, in its order: the name, the check, and whether only node 0 makes it.
_CHECKS: list[tuple[str, "Callable[[Settings], str | None]", bool]] = [
    ("weights", check_weights, False),
    ("grpc", _grpc, False),
    ("tracing", _tracing, False),
    ("keys", check_keys, True),
    ("tls", _tls, True),
    ("address", _address, True),
    ("rendezvous", _rendezvous, False),
    ("channels", _channels, True),
    ("temporary folder", _temporary_folder, False),
    ("backend", check_backend, False),
    ("expert store", _expert_store, False),
    ("kernel cache", _kernel_cache, False),
    ("cpus", _cpus, False),
    ("partitions", check_partitions, False),
]


def _print_tables(rows: list[SettingRow], results: list[CheckResult]) -> None:
    if rows:
        _print_columns(
            [("setting", "value", "origin"), *((row.key, json.dumps(row.value), row.origin) for row in rows)]
        )
        print()
    words = {True: "ok", False: "error", None: "not checked"}
    found = ((result.name, words[result.ok], result.detail) for result in results)
    _print_columns([("check", "result", ""), *found])


def _print_columns(rows: list[tuple[str, str, str]]) -> None:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for row in rows:
        print(f"{row[0]:{first}}  {row[1]:{second}}  {row[2]}".rstrip())
