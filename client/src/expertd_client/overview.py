"""The command `pool`: all servers of a pool on one screen."""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, InvalidRequestError, ServerBusyError
from expertd_client.http.requests import model_path
from expertd_client.server import Server, ServerOptions
from expertd_client.sources import Fixed, UrlSource, source_of
from expertd_client.steps import run_async
from expertd_client.tls import File

_SECONDS = 1.0  # that a server may take for an answer
_CLEAR = "\x1b[H\x1b[2J"
_NONE = "-"
_HEADER = ("server", "state", "layers", "experts", "tokens/s", "steps/s", "queue ms", "in steps", "callers")


class Totals(NamedTuple):
    """Of a server since its start, over all layers; seconds of queues are those of all requests."""

    tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    queued: int = 0
    queue_seconds: float = 0.0


@dataclass(slots=True)
class Seen:
    """What a server says.

    state    ready, or why it is not
    experts  that it holds of the first layer, as its metadata says; "all"
    callers  connections to its channels, by process; None: it does not say
    """

    url: str
    at: float
    state: str = "ready"
    layers: int = 0
    ready_layers: int = 0
    experts: str = ""
    totals: Totals | None = None
    callers: dict[int, int] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="of each server, or dns:NAME:PORT, or file:/PATH"
    )
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks (2)")
    parser.add_argument("--count", type=int, default=None, help="looks, then end; for ever if absent")
    parser.add_argument("--json", action="store_true", help="print an object in a line for each look instead")
    parser.add_argument("--ca", default=None, help="file of CA certificates to trust with https")


def run(arguments: argparse.Namespace) -> int:
    """Look at servers until Ctrl-C; returns the exit code."""
    try:
        if not 0 < arguments.interval < math.inf:
            raise InvalidRequestError(f"--interval: expected a positive number, got {arguments.interval}")
        if arguments.count is not None and arguments.count < 1:
            raise InvalidRequestError(f"--count: expected at least 1, got {arguments.count}")
        urls = arguments.urls
        source = source_of(urls[0]) if len(urls) == 1 else Fixed(urls)
        asyncio.run(_look(source or Fixed(urls), arguments))
    except (InvalidRequestError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


async def _look(source: UrlSource, arguments: argparse.Namespace) -> None:
    servers: dict[str, Server] = {}
    before: dict[str, Seen] = {}
    urls: list[str] = []
    number = 0
    try:
        while True:
            began, number = time.monotonic(), number + 1
            try:
                found = await asyncio.to_thread(source.urls)
                servers |= {url: _server(url, arguments.ca) for url in found if url not in servers}
                urls = found
            except (OSError, ValueError):  # as a pool does, it keeps those of before
                if not urls:
                    raise
            seen = await asyncio.gather(*(_ask(servers[url]) for url in urls))
            rows = [row_of(each, before.get(each.url)) for each in seen]
            _show(rows, arguments.json, is_screen=sys.stdout.isatty() and arguments.count != 1)
            before = {each.url: each for each in seen}
            if number == arguments.count:
                return
            await asyncio.sleep(max(0.0, began + arguments.interval - time.monotonic()))
    finally:
        for server in servers.values():
            await run_async(server.close())


def _server(url: str, ca: File | None) -> Server:
    return Server(
        url, ServerOptions(None, ca if url.startswith("https:") else None, None, "http", 4, 0, _SECONDS)
    )


async def _ask(server: Server) -> Seen:
    """All that a server says, within its time for each."""

    async def get(path: str, method: str = "GET") -> Any:
        return await run_async(server.request(method, path, Deadline(_SECONDS)))

    seen = Seen(server.url, time.monotonic())
    try:
        await get("/v2/health/ready")
    except ServerBusyError as error:
        seen.state = str(error)
    except ExpertError as error:
        seen.state = f"down: {error}"
        return seen
    try:
        models = await get("/v2/repository/index", "POST")
        seen.layers = len(models)
        ready = [model["name"] for model in models if model["state"] == "READY"]
        seen.ready_layers = len(ready)
        if ready:
            told = await get(model_path(ready[0]))
            seen.experts = str((told.get("parameters") or {}).get("local_experts") or "all")
        seen.totals = _totals(await get("/v2/models/stats"))
        seen.callers = _callers(await get("/v1/channels"))
    except ExpertError as error:  # without a key, or channels, or just ending: what is known is shown
        if seen.totals is None and seen.state == "ready":
            seen.state = str(error)
    except (KeyError, TypeError, AttributeError) as error:
        seen.state = f"no expertd server: {error!r:.80}"
    return seen


def _totals(answer: Any) -> Totals:
    tokens = steps = queued = step_ns = queue_ns = 0
    for model in answer["model_stats"]:
        tokens += model["inference_count"]
        steps += model["execution_count"]
        queue = model["inference_stats"]["queue"]
        queued, queue_ns = queued + queue["count"], queue_ns + queue["ns"]
        step_ns += sum(size["compute_infer"]["ns"] for size in model["batch_stats"])
    return Totals(tokens, steps, step_ns / 1e9, queued, queue_ns / 1e9)


def _callers(answer: Any) -> dict[int, int]:
    owners = [channel["owner"] for channel in answer["channels"] if channel["owner"] is not None]
    return {owner: owners.count(owner) for owner in owners}


def row_of(seen: Seen, before: Seen | None) -> dict[str, Any]:
    """The values of a row; None: not known, as rates at the first look, and of a server that began anew."""
    row: dict[str, Any] = dict.fromkeys(_HEADER)
    row |= {"server": seen.url, "state": seen.state}
    if seen.layers:
        row |= {"layers": f"{seen.ready_layers} of {seen.layers}", "experts": seen.experts or None}
    if seen.callers is not None:
        row["callers"] = seen.callers
    if before is None or seen.totals is None or before.totals is None:
        return row
    seconds = seen.at - before.at
    more = [now - then for now, then in zip(seen.totals, before.totals, strict=True)]
    tokens, steps, step_seconds, queued, queue_seconds = more
    if min(more) >= 0 and seconds > 0:
        row |= {
            "tokens/s": tokens / seconds,
            "steps/s": steps / seconds,
            "queue ms": 1e3 * queue_seconds / queued if queued else None,
            "in steps": step_seconds / seconds,
        }
    return row


def _show(rows: Sequence[dict[str, Any]], as_json: bool, is_screen: bool) -> None:
    if as_json:
        print(json.dumps({"servers": rows}), flush=True)
        return
    print((_CLEAR if is_screen else "") + table_of(rows), flush=True)


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row, in columns."""
    lines = [list(_HEADER), *([_text(name, row[name]) for name in _HEADER] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(
            text.ljust(width) if place < 4 or place == len(widths) - 1 else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded) + "\n"


def _text(name: str, value: Any) -> str:
    if value is None:
        return _NONE
    if name == "callers":
        channels, processes = sum(value.values()), len(value)
        if not channels:
            return "none"
        return f"{_count(channels, 'channel')} of {_count(processes, 'process', 'processes')}"
    if name == "in steps":
        return f"{100 * value:.0f} %"
    if name == "queue ms":
        return f"{value:.2f}"
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
