"""Opening a channel: what the server is asked for, and what its refusals mean."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from expertd_client.arenas import Sizes
from expertd_client.channel.claiming import claim
from expertd_client.channel.layout import MAX_SLOTS, VERSION
from expertd_client.channel.link import SPIN_SECONDS, ChannelClient
from expertd_client.deadline import Deadline
from expertd_client.device_memory import GpuAllocation
from expertd_client.directory import ArenaRefusedError, Wanted, largest
from expertd_client.errors import (
    AccessDeniedError,
    DeadlineError,
    ExpertError,
    InvalidRequestError,
    ServerUnreachableError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.http.requests import model_path
from expertd_client.nixl.process import CallerProcess
from expertd_client.steps import Steps, Work
from expertd_client.transport import Asker

if TYPE_CHECKING:
    import torch

_PATH = "/v1/channels"
# Answers may come in any order, but requests take the server's slots in turn: with more slots than places,
# a slow request does not hold up the others.
_SLOTS_PER_PLACE = 4
_STREAM_SLOTS = 256  # at least, for a GPU: how many requests its stream may be behind the caller


@dataclass(frozen=True, slots=True)
class Opened:
    """A channel and its data region: bytes in host memory, or in memory of a GPU, `exported` (`device`)."""

    link: ChannelClient
    sizes: Sizes
    hidden_size: int
    top_k: int
    host: "npt.NDArray[np.uint8] | None"
    device: "torch.Tensor | None"
    exported: GpuAllocation | None = None


def open_channel(
    http: Asker,
    models: tuple[str, ...],
    sizes: Sizes,
    device: int | None,
    deadline: Deadline,
    spin_seconds: float = SPIN_SECONDS,
    lost: Opened | None = None,
    over_nixl: bool = False,
    num_slots: int | None = None,
) -> Steps[Opened]:
    """Open a channel with `sizes.num_bytes` of data, on the GPU `device` or in host memory (None).

    `lost`: one that has ended, whose memory the new one takes over, at the same addresses. `over_nixl`: to a
    server on another machine. `num_slots`: of the server; None: enough for requests by submit and enqueue.

    Raises RefusedError, TransportUnavailableError if the server has no channels or they cannot be used from
    here; AccessDeniedError, UnknownModelError, DeadlineError, ServerUnreachableError.
    """
    is_tried = False
    memory: Any = {"system": {"byte_size": sizes.num_bytes}}
    exported = lost.exported if lost is not None else None
    if device is not None and exported is None:
        exported = yield Work(partial(GpuAllocation, device, sizes.num_bytes))
    if exported is not None:
        memory = {"cuda": exported.described()}
    min_slots = 0 if exported is None else _STREAM_SLOTS
    num_slots = num_slots or min(MAX_SLOTS, max(min_slots, _SLOTS_PER_PLACE * sizes.num_places))
    body: dict[str, Any] = {
        "version": VERSION,
        "num_slots": num_slots,
        "max_tokens": sizes.max_tokens,
        "memory": memory,
    }
    body |= {"model": models[0]} if len(models) == 1 else {"models": models}
    place = lost.link.data if lost is not None else None
    while True:
        process: CallerProcess | None = None
        if over_nixl:
            process = yield Work(partial(CallerProcess, sizes.num_bytes, deadline))
            body["memory"] = process.memory()
        try:
            opened = yield from post(http, models, body, deadline)
        except BaseException:
            if process is not None:
                process.close()
            raise
        take = claim if process is None else process.claim
        try:
            link = ChannelClient((yield Work(partial(take, opened, deadline, place))), spin_seconds)
            if exported is None:  # a server that hangs could write to a GPU's memory later
                http.channel_opened(opened, link)
            break
        except TransportUnavailableError:  # it may have ended since it answered
            if is_tried or not deadline.may_repeat():
                raise
            is_tried = True
    geometry = opened["geometry"]
    try:
        hidden_size, top_k = int(geometry["hidden_size"]), int(geometry["top_k"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransportUnavailableError(f"answer: expected a channel, got {opened!r:.200}") from error
    host = None if link.data is None else np.frombuffer(link.data, np.uint8)
    device_data = lost.device if lost is not None else exported.tensor() if exported else None
    return Opened(link, sizes, hidden_size, top_k, host, device_data, exported)


def open_largest(http: Asker, wanted: Wanted, over_nixl: bool = False) -> Steps[Opened]:
    """`open_channel` with the sizes that are wanted, or else with smaller ones."""
    model, gpu, deadline = wanted.model, wanted.gpu, wanted.deadline

    def make(sizes: Sizes) -> Steps[Opened]:
        return open_channel(http, (model,), sizes, gpu, deadline, over_nixl=over_nixl)

    return (yield from largest(wanted, make))


def post(http: Asker, models: tuple[str, ...], body: object, deadline: Deadline) -> Steps[Any]:
    """What the server answers to the opening of a channel. Raises as `open_channel`."""
    try:
        return (yield from http.request("POST", _PATH, deadline, body))
    except UnknownModelError as error:
        # Raises it too, unless it is the path that is unknown.
        for model in models:
            yield from http.request("GET", model_path(model), deadline)
        text = f"channels: expected a server that has them, got: {error}"
        raise TransportUnavailableError(text) from error
    except InvalidRequestError as error:
        if error.status in (403, 405):
            raise TransportUnavailableError(str(error), error.status) from error
        raise ArenaRefusedError(error) from error
    except (AccessDeniedError, DeadlineError, ServerUnreachableError):
        raise
    except TransportUnavailableError:
        raise
    except ExpertError as error:
        raise ArenaRefusedError(error) from error
