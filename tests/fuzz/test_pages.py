"""The page that a channel's caller writes: whatever is there, the channel ends or its slots are answered."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from expertd.layout import Layout
from expertd.service.channels.channel import ServerChannel
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest, StepResult
from expertd_client.channel.layout import HEADER_BYTES, SLOT_BYTES
from tests.fuzz.mutations import cases
from tests.service.apps import HIDDEN, Serving, rows
from tests.service.channels.peer import Peer
from tests.service.channels.servers import channel_server, claimed
from tests.service.runners import Computed, EchoRunner

pytestmark = pytest.mark.slow

NUM_SLOTS, LINE_BYTES = 4, 128
FEW = 50  # pages that one channel gets, if it lives so long


def write(peer: Peer, data: bytes) -> None:
    """Put `data` into the page: the beginnings of the slots, and then bytes anywhere."""
    for number in range(NUM_SLOTS):
        start, line = (
            HEADER_BYTES + number * SLOT_BYTES,
            data[number * LINE_BYTES : (number + 1) * LINE_BYTES],
        )
        peer.control[start : start + len(line)] = line
    rest = data[NUM_SLOTS * LINE_BYTES :][:256]
    if len(rest) > 2:
        start = int.from_bytes(rest[:2], "little") % (len(peer.control) - 256)
        peer.control[start : start + len(rest) - 2] = rest[2:]


def zeros(request: LayerRequest) -> bytes:
    """The output of a request with a timeout, which the channel copies to its place."""
    return bytes(request.num_tokens * HIDDEN * (4 if request.output_datatype == "FP32" else 2))


class ZeroRunner(EchoRunner):
    """Writes zeros, whatever the datatypes are."""

    def begin(self, requests: Sequence[LayerRequest]) -> Computed:
        outputs = [request.output or zeros(request) for request in requests]
        for request in requests:
            if request.output is not None:
                host_view(request.output)[:] = bytes(request.output.num_bytes)
        num_tokens = sum(request.num_tokens for request in requests)
        counts = np.array([num_tokens, 0, 0, 0])
        return Computed(StepResult([*outputs], Layout.MASKED, num_tokens, lambda: counts, 1e-5))


async def opened(server: Serving) -> tuple[Peer, ServerChannel]:
    """A channel, both sides of it."""
    peer = await claimed(server, num_slots=NUM_SLOTS)
    (entry,) = server.app.channels.entries.values()
    assert isinstance(entry.channel, ServerChannel)
    return peer, entry.channel


async def settled(channel: ServerChannel) -> None:
    while channel._in_flight and not channel._closed:
        await asyncio.sleep(0)


async def closed(server: Serving, peer: Peer) -> None:
    peer.close()
    while server.app.channels.entries:
        await asyncio.sleep(0)


async def fuzz(folder: Path) -> Serving:
    async with channel_server(folder, ZeroRunner()) as server:
        peer, channel = await opened(server)
        for number, data in enumerate(cases("pages"), 1):
            write(peer, data)
            channel.poll()
            await settled(channel)
            if channel._ended or number % FEW == 0:
                await closed(server, peer)
                peer, channel = await opened(server)
        await closed(server, peer)
        honest, _ = await opened(server)
        assert not (await asyncio.to_thread(honest.infer, rows(2))).any()
        await closed(server, honest)
        return server


def test_pages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # a caller that lies is no error of the server
    server = asyncio.run(fuzz(tmp_path))
    assert [record.getMessage() for record in caplog.records] == []
    for status in ("200", "400"):
        assert server.metric("requests_total", model="tiny", status=status) > 0
    assert server.metric("requests_total", model="tiny", status="500") == 0
