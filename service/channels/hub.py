"""All channels of a server: opening, claiming, closing, their limits and metrics."""

import asyncio
import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from expertd.device_calls import MAX_SLOTS
from expertd.service.channels.call_channel import CallChannel, CallGeometry
from expertd.service.channels.channel import ServerChannel
from expertd.service.channels.geometry import Geometry
from expertd.service.channels.open_channel import Answered, Memory, OpenChannel
from expertd.service.channels.opening import Opening
from expertd.service.channels.requests import ChannelModel, RequestReader
from expertd.service.engine.calls import CallServer
from expertd.service.engine.engine import Engine
from expertd.service.engine.errors import (
    ChannelLimitError,
    ChannelRefusedError,
    ChannelsDisabledError,
    ExecutorClosedError,
    UnknownChannelError,
)
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.steps import caller_number
from expertd.service.settings.parts import ChannelSettings
from expertd.service.util.logs import with_fields
from expertd.service.util.sentences import shown
from expertd_client.channel.layout import TOKEN_BYTES

logger = logging.getLogger(__name__)

_CLAIM_SECONDS = 10.0
_GIVE_WAY_SECONDS = 1.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG)  # the last one: above `ulimit -f`
_CAPTURE_SECONDS = 60.0  # that it may take to capture the steps of a layer
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 1  # by then, unclaimed channels give way


@dataclass(slots=True)
class Entry:
    """An open channel: with its token until it is claimed, then with its owner's process id."""

    channel: ServerChannel | CallChannel
    opening: Opening
    token: bytes | None
    opened: float  # of time.monotonic
    ours: bool = False  # of an HTTP process of this server: not limited, not listed, not counted
    owner: int | None = None
    expiry: asyncio.TimerHandle | None = None
    alarm: asyncio.TimerHandle | None = None  # the only one of its requests' timeouts
    disconnect: Callable[[], None] | None = None


class ChannelHub:
    """Opens and closes channels, on the event loop. Implements `Owner`."""

    def __init__(self, settings: ChannelSettings, engine: Engine, metrics: Metrics) -> None:
        self.settings = settings
        self.socket: Path | None = None  # where channels are claimed
        self.claim_seconds = _CLAIM_SECONDS
        self.give_way_seconds = _GIVE_WAY_SECONDS
        self.entries: dict[str, Entry] = {}  # by id
        self.used_bytes = 0  # of data regions, also those of closed channels until they are freed
        self.instance = engine.instance
        self._engine, self._metrics = engine, metrics
        log = engine.settings
        self._logs_requests = log.access_log and log.log_format == "json"
        self._opened = 0  # channels so far
        self._opening = 0
        self._freeing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # of the event loop
        engine.repository.on_unload = self._forget
        metrics.watch_channels(lambda: (len(self.listed), self.used_bytes))

    def start(self) -> None:
        """Use the running event loop from now on."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    async def open(self, opening: Opening) -> Entry:
        """Open a channel, which must be claimed within `claim_seconds`.

        If there is no place for it, it takes those of channels that were not claimed for `give_way_seconds`.
        Raises ChannelLimitError, ChannelRefusedError, ChannelsDisabledError, NotReadyError,
        ExecutorClosedError and UnknownModelError.
        """
        self.check_enabled(opening.kind)
        specs = [self._engine.model(name) for name in opening.models]
        if self._engine.draining:
            raise ExecutorClosedError("the server is shutting down")
        for name in opening.models:
            self._engine.check_loaded(name)
        loaded = self._engine.loaded
        assert loaded is not None
        calls = loaded.calls
        if opening.kind == "device_calls":
            if calls is None:
                where = f"backend {loaded.backend!r}, without ranks or lanes"
                raise ChannelRefusedError(f"memory: expected system or cuda on {where}, got device_calls")
            opening.check(MAX_SLOTS, min(calls.max_tokens, *(spec.max_request_tokens for spec in specs)))
        geometry = opening.geometry(specs)
        await self._make_room(geometry.data_bytes)
        self._reserve(geometry.data_bytes)
        try:
            if isinstance(geometry, CallGeometry):
                assert calls is not None
                return await self._add_calls(opening, geometry, calls)
            memory = await opening.allocate(geometry, loaded)
            return self._add(opening, memory)
        except BaseException as error:
            self.used_bytes -= geometry.data_bytes
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                text = f"channels: the server has no room for another one: {error.strerror}"
                raise ChannelLimitError(text, _RETRY_SECONDS) from error
            raise
        finally:
            self._opening -= 1

    async def open_ours(self, opening: Opening) -> Entry:
        """Open a channel for an HTTP process of this server, once the engine has loaded."""
        assert self._engine.loaded is not None
        geometry = opening.geometry([self._engine.model(name) for name in opening.models])
        assert isinstance(geometry, Geometry)
        memory = await opening.allocate(geometry, self._engine.loaded)
        return self._add(opening, memory, ours=True)

    def get(self, channel_id: str) -> Entry:
        """The open channel with this id. Raises ChannelsDisabledError, UnknownChannelError."""
        self.check_enabled()
        entry = self.entries.get(channel_id)
        if entry is None or entry.ours:
            raise UnknownChannelError(f"channel: expected the id of an open channel, got {shown(channel_id)}")
        return entry

    @property
    def listed(self) -> list[Entry]:
        """The open channels of callers."""
        return [entry for entry in list(self.entries.values()) if not entry.ours]  # a scrape is on a thread

    def check_enabled(self, kind: str = "") -> None:
        """Raise ChannelsDisabledError if the server has no channels, or none of this kind."""
        if kind == "nixl" or (not kind and self.settings.nixl):
            if not self.settings.nixl:
                raise ChannelsDisabledError("channels: expected the setting channels.nixl, got false")
        elif self.socket is None:
            where = "the setting channels.socket"
            if self.settings.socket is None:
                raise ChannelsDisabledError(f"channels: expected {where}, got null")
            expected = f"a server on loopback that has a folder for their socket, or {where}"
            raise ChannelsDisabledError(f"channels: expected {expected}, got neither")

    def claim(
        self, token: bytes, owner: int, disconnect: Callable[[], None]
    ) -> ServerChannel | CallChannel | None:
        """Give the channel of `token` to the process `owner`, once; None if there is no such channel.

        `disconnect` ends the owner's connection; it is called when the channel is closed.
        """
        for entry in self.entries.values():
            if entry.token is not None and secrets.compare_digest(entry.token, token):
                entry.token, entry.owner, entry.disconnect = None, owner, disconnect
                assert entry.expiry is not None
                entry.expiry.cancel()
                if isinstance(entry.channel, ServerChannel):
                    self._engine.executor.add_source(entry.channel)
                return entry.channel
        return None

    def close(self, channel: OpenChannel | CallChannel, why: str) -> None:
        """Close a channel; its memory is freed once no step uses it. Later calls do nothing."""
        entry = self.entries.pop(channel.id, None)
        if entry is None:
            return
        assert entry.expiry is not None
        entry.expiry.cancel()
        if entry.alarm is not None:  # it would keep the memory mapped
            entry.alarm.cancel()
        log = logger.debug if entry.ours else logger.info
        log("channel %s of %s closed: %s", channel.id, channel.served, why)
        if isinstance(channel, CallChannel):  # no answer may come once its caller has found another server
            channel.on_release = entry.disconnect or channel.on_release
            self._free(channel)
            return
        channel.close()
        if entry.disconnect is not None:
            entry.disconnect()

    def close_others(self, callers: Collection[str]) -> None:
        """Close the channels that were opened with keys of other names than these."""
        for entry in self.listed:
            if entry.opening.caller not in callers:
                self.close(entry.channel, f"key {entry.opening.caller} may not infer any more")

    async def stop(self) -> None:
        """Close every channel, and free the memory that no step uses."""
        for entry in list(self.entries.values()):
            self.close(entry.channel, "the server is shutting down")
        if not self._engine.device_failed:
            await self._freed()

    def answered(self, channel: OpenChannel, answer: Answered) -> None:
        report = partial(self._count, channel, answer)
        if self._is_here:
            report()
        else:
            self._engine.executor.report_later(report)

    def broken(self, channel: OpenChannel | CallChannel, why: str) -> None:
        logger.warning("channel %s of %s: %s", channel.id, channel.served, why)
        self._soon(self.close, channel, "its caller broke the protocol")

    def idle(self, channel: OpenChannel) -> None:
        self._soon(self._free, channel)

    def expire_at(self, channel: OpenChannel, when: float) -> None:
        self._soon(self._expire_at, channel, when)

    @property
    def _is_here(self) -> bool:
        """Whether the event loop asks."""
        return threading.get_ident() == self._thread

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call, *arguments)

    def _expire_at(self, channel: OpenChannel, when: float) -> None:
        assert self._loop is not None
        entry = self.entries.get(channel.id)
        if entry is None:
            return
        if entry.alarm is not None:
            entry.alarm.cancel()
        entry.alarm = self._loop.call_later(max(0.0, when - time.perf_counter()), channel.expire)

    def _free(self, channel: OpenChannel | CallChannel) -> None:
        task = asyncio.get_running_loop().create_task(self._release(channel))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _release(self, channel: OpenChannel | CallChannel) -> None:
        if self._engine.device_failed:  # ending its access would wait for what it computes
            if isinstance(channel, CallChannel):
                channel.released.set()
            return
        try:
            if isinstance(channel, CallChannel):
                await channel.release()
            else:
                await asyncio.to_thread(channel.release)
        except Exception:
            logger.exception("channel %s of %s: its memory is not freed", channel.id, channel.served)
            return
        finally:
            if isinstance(channel, CallChannel):
                channel.released.set()
        if channel.counted:
            self.used_bytes -= channel.geometry.data_bytes

    def _count(self, channel: OpenChannel, answer: Answered) -> None:
        if answer.reason is not None:
            what = (answer.status, answer.reason, answer.model, channel.id, answer.sequence, answer.text)
            logger.debug("%d %s: model %s, channel %s, request %d: %s", *what)
        stages = answer.stages if answer.reason is None else None
        self._metrics.request_done(answer.model, answer.reason, answer.seconds, stages)
        if self._logs_requests:
            if self._is_here:
                self._log(channel, answer)
            else:  # on the worker thread, which writing would delay
                self._soon(self._log, channel, answer)

    def _log(self, channel: OpenChannel, answer: Answered) -> None:
        """The line of a request."""
        _, queue, compute = answer.stages
        fields = with_fields(
            model=answer.model,
            status=answer.status,
            reason=answer.reason,
            error=answer.text or None,
            request_id=f"{channel.id}/{answer.sequence}",
            key=channel.key or None,
            tokens=answer.num_tokens,
            seconds=round(answer.seconds, 6),
            queue_seconds=round(queue, 6),
            compute_seconds=round(compute, 6),
        )
        logger.info("infer %d", answer.status, extra=fields)

    async def _make_room(self, num_bytes: int) -> None:
        """Close the oldest unclaimed channels if a new one of `num_bytes` does not fit beside them."""
        settings, latest = self.settings, time.monotonic() - self.give_way_seconds
        if num_bytes > settings.max_bytes:
            expected = f"expected a region of at most {settings.max_bytes} bytes"
            raise ChannelRefusedError(f"channels.max_bytes: {expected}, got {num_bytes}")
        idle = [entry for entry in self.listed if entry.token is not None and entry.opened <= latest]
        for entry in idle:
            full = len(self.listed) + self._opening >= settings.max_channels
            if not full and num_bytes <= settings.max_bytes - self.used_bytes:
                return
            if entry.token is not None:  # not claimed meanwhile
                self.close(entry.channel, "its place was needed before it was claimed")
                await self._freed()

    async def _freed(self) -> None:
        """Wait until the memory of closed channels that no step uses is freed."""
        await asyncio.sleep(0)  # runs the calls of `_free`
        await asyncio.gather(*self._freeing)

    def _reserve(self, num_bytes: int) -> None:
        count, left, text = len(self.listed), self.settings.max_bytes - self.used_bytes, ""
        if count + self._opening >= (max_channels := self.settings.max_channels):
            text = f"channels.max_channels: expected fewer than {max_channels} open channels, got {count}"
        elif num_bytes > left:
            expected = f"a region of at most {left} bytes beside the open channels"
            text = f"channels.max_bytes: expected {expected}, got {num_bytes}"
        if text:
            gives_way = self._opening or any(entry.token is not None for entry in self.listed)
            raise ChannelLimitError(text, _RETRY_SECONDS if gives_way else 0)
        self._opening += 1
        self.used_bytes += num_bytes

    def _add(self, opening: Opening, memory: Memory, ours: bool = False) -> Entry:
        try:
            channel = self._channel(opening, memory, ours)
        except BaseException:
            memory.close()
            raise
        return self._entered(Entry(channel, opening, None, time.monotonic(), ours))

    async def _add_calls(self, opening: Opening, geometry: CallGeometry, calls: CallServer) -> Entry:
        executor = self._engine.executor
        try:
            for name in opening.models:  # one by one, as other requests have steps meanwhile
                await executor.between_steps(partial(calls.prepare, name), _CAPTURE_SECONDS)
            memory = await executor.between_steps(partial(calls.share, geometry.data_bytes))
        except ValueError as error:
            raise ChannelRefusedError(str(error)) from error
        self._opened += 1
        channel = CallChannel(self._opened, opening.models, geometry, memory, calls, executor)
        channel.key = opening.caller
        entry = self._entered(Entry(channel, opening, None, time.monotonic()))
        self._look_for_faults(channel)
        return entry

    def _look_for_faults(self, channel: CallChannel) -> None:
        """Close a channel whose caller lies, within a second."""
        if channel.id not in self.entries:
            return
        if channel.has_fault:
            self.broken(channel, "a call's header: expected the next sequence, and its models and tokens")
        asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_for_faults, channel)

    def _entered(self, entry: Entry) -> Entry:
        """`entry`, with a token until it is claimed."""
        channel, entry.token = entry.channel, secrets.token_bytes(TOKEN_BYTES)
        text = f"it was not claimed within {self.claim_seconds:g} s"
        entry.expiry = asyncio.get_running_loop().call_later(self.claim_seconds, self.close, channel, text)
        self.entries[channel.id] = entry
        return entry

    def _channel(self, opening: Opening, memory: Memory, ours: bool) -> ServerChannel:
        models = [self._model(name, opening.kind in ("system", "nixl")) for name in opening.models]
        reader = RequestReader(memory.geometry, memory.region.span, models)
        self._opened += 1
        executor = self._engine.executor
        caller = None if ours else caller_number(opening.caller)
        channel = ServerChannel(self._opened, opening.models, memory, reader, executor, self, caller)
        channel.key = opening.caller
        return channel

    def _model(self, name: str, in_host_memory: bool) -> ChannelModel:
        spec = self._engine.model(name)
        # The masked layout needs ids that are checked, which those in a GPU's memory are not.
        routed = in_host_memory or not spec.host_routing
        validate = partial(self._engine.validate, name)  # by its name: another runner may be loaded later
        return ChannelModel(name, spec.hidden_size, spec.top_k, validate, routed, spec.takes_fp8)

    def _forget(self, model: str) -> None:
        """Have channels keep nothing of the graphs of a model that is unloaded."""
        for entry in list(self.entries.values()):
            if isinstance(entry.channel, ServerChannel) and model in entry.channel.models:
                entry.channel.forget_requests(model)
        if self._engine.loaded is not None and self._engine.loaded.calls is not None:
            self._engine.loaded.calls.forget(model)
