"""What an HTTP process is started with, and the messages that it gets later; imports no torch."""

import mmap
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from expertd.service.channels.cells import CELL_BYTES
from expertd.service.engine import queue_counts
from expertd.service.engine.metrics import requests
from expertd.service.engine.metrics.requests import NUM_KEY_CELLS
from expertd.service.engine.queue_counts import QueueCounts
from expertd.service.settings.certificates import TlsFiles
from expertd.service.settings.keys import ApiKey
from expertd.service.settings.model import Settings

# Messages to a process; the first one of a channel's comes with its descriptors.
DRAIN = b"drain"  # end connections after their next answer
FINISH = b"finish"  # accept no more connections, and exit when all are answered; with the seconds for it
LEVEL = b"level "  # of log lines from now on, which follows
STOP = b"stop"  # exit at once

_CELL_SLOTS = 4  # for each cell: a request that takes long holds up those as many slots later
_MAX_CELLS = 512
_CELLS_PART = 4  # beside the memory for large bodies, at most this part of it for cells


class WorkerSetup(BaseModel):
    """The setup of one process, as JSON on its standard input; the numbers from `control` on are descriptors.

    settings       of a server of one process, with this one's share of the limits
    engine         path of the engine's Unix socket
    num_processes  and the number of this one, from 0
    waits          for its channel, before it accepts connections: the engine has loaded
    keys, tls      to begin with, if the settings name files of them, which may be invalid at present
    """

    model_config = ConfigDict(frozen=True)

    settings: Settings
    engine: Path
    index: int
    num_processes: int
    waits: bool
    control: int
    listener: int
    counts: int
    keys: tuple[ApiKey, ...] | None = None
    tls: TlsFiles | None = None


class SharedCounts:
    """The counts of all HTTP processes: open connections, bytes of bodies and outputs, what waits, requests,
    and those by key.
    """

    def __init__(self, descriptor: int, num_processes: int, num_models: int) -> None:
        self._stride = requests.num_cells(num_models)
        self._num_models = num_models
        num_queues = (1 + num_processes) * queue_counts.num_cells(num_models)
        size = num_processes * (2 + self._stride + NUM_KEY_CELLS) + num_queues
        num_bytes = size * requests.CELL_BYTES
        os.ftruncate(descriptor, num_bytes)
        cells = memoryview(mmap.mmap(descriptor, num_bytes)).cast("d")
        self.connections, cells = cells[:num_processes], cells[num_processes:]
        self._buffered, cells = cells[:num_processes], cells[num_processes:]
        self._queues, self._requests = cells[:num_queues], cells[num_queues:]
        self._keys = self._requests[num_processes * self._stride :]

    def buffered(self, index: int) -> "memoryview[float]":
        """The cell of a process for the bytes of its arena in use."""
        return self._buffered[index : index + 1]

    def queues(self, index: int | None) -> QueueCounts:
        """What waits for each model, for this process to count in; None: for the one that owns the device."""
        return QueueCounts(self._queues, self._num_models, 0 if index is None else 1 + index)

    def requests(self, index: int) -> "memoryview[float]":
        """The cells of a process, for `RequestCounts`."""
        return self._requests[index * self._stride : (index + 1) * self._stride]

    def keys(self, index: int) -> "memoryview[float]":
        """The cells of a process, for `KeyCounts`."""
        return self._keys[index * NUM_KEY_CELLS : (index + 1) * NUM_KEY_CELLS]


def shares(settings: Settings) -> Settings:
    """The settings of one process alone: its share of connections and memory."""
    count, limits = settings.http_workers, settings.limits
    update = {
        "max_connections": max(1, -(-limits.max_connections // count)),
        "max_connections_per_address": max(1, -(-limits.max_connections_per_address // count)),
        "max_buffered_bytes": settings.buffered_bytes // count,
    }
    return settings.model_copy(update={"http_workers": 1, "limits": limits.model_copy(update=update)})


def channel_cells(settings: Settings) -> int:
    """How many requests a process may have in its channel."""
    return max(8, min(_MAX_CELLS, settings.buffered_bytes // _CELLS_PART // CELL_BYTES))


def channel_sizes(settings: Settings) -> tuple[int, int]:
    """The number of slots, and the bytes of the data region, of the channel of a process."""
    cells = channel_cells(settings)
    return _CELL_SLOTS * cells, cells * CELL_BYTES + settings.buffered_bytes
