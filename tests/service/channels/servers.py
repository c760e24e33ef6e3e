"""Applications with channels, in this process, and claimed channels of them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from expertd.service.engine.loading import load
from expertd.service.engine.steps import Runner
from tests.service.apps import Serving, serving, serving_runner, tiny_settings
from tests.service.channels.peer import Answer, Peer


@asynccontextmanager
async def channel_server(
    directory: Path,
    runner: Runner | None = None,
    limits: Mapping[str, float] | None = None,
    channels: Mapping[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[Serving]:
    """A server with channels; without `runner` it computes the layer "tiny"."""
    given = {"socket": str(directory / "channels"), **(channels or {})}
    loader = load if runner is None else serving_runner(runner)
    async with serving(tiny_settings(limits, channels=given, **changes), loader) as server:
        yield server


@asynccontextmanager
async def channel(
    directory: Path,
    runner: Runner | None = None,
    limits: Mapping[str, float] | None = None,
    request: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> AsyncIterator[tuple[Serving, Peer]]:
    """A server, and a channel of it, which is closed at the end; see `channel_server` and `claimed`."""
    async with channel_server(directory, runner, limits, **changes) as server:
        peer = await claimed(server, **request)
        try:
            yield server, peer
        finally:
            peer.close()


async def opened(server: Serving, **request: Any) -> dict[str, Any]:
    """A new channel of the model "tiny", as POST answers."""
    given = {"version": 3, "model": "tiny", "num_slots": 4, "max_tokens": 16, **request}
    body = {name: value for name, value in given.items() if value is not None}
    response = await server.http.post("/v1/channels", json=body)
    assert response.status_code == 201, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def claimed(server: Serving, **request: Any) -> Peer:
    """The caller's side of a new channel; it never spins, because server and caller are one process."""
    return await asyncio.to_thread(Peer, await opened(server, **request), 0.0)


async def answer_to(peer: Peer, sequence: int) -> Answer:
    """The answer to request `sequence`."""
    return await asyncio.to_thread(peer.wait, sequence)


async def answer_of(peer: Peer, num_tokens: int = 1, **request: Any) -> Answer:
    """The answer to a request at its default places."""
    return await answer_to(peer, peer.send(num_tokens, peer.places(peer.sequence + 1), **request))


def mapped() -> int:
    """The parts of this process's memory that belong to channels."""
    return Path("/proc/self/maps").read_text().count("/memfd:expertd-channel")
