"""A channel whose places are shared by calls: copies in and out, requests for them, and answers."""

import threading

from expertd_client.arenas import CallArena, Holder
from expertd_client.calls import LayerCall
from expertd_client.channel.layout import CODES, REQUEST, ROUTED
from expertd_client.channel.opening import Opened
from expertd_client.channel.waiting import Waiters
from expertd_client.deadline import Deadline
from expertd_client.errors import InvalidRequestError
from expertd_client.gpu_places import GpuPlaces
from expertd_client.places import copy_in, copy_out, layout_of

_TIMEOUT_UNIT = 1000  # microseconds: the server parses a line again only if it differs from the slot's last
_kept: list[object] = []  # memory that a step may still use


class ChannelArena(CallArena):
    """The channel of one model, for tensors of the host or of one GPU.

    `holder` hears if places may have become free, or the channel unusable. Threads find that out themselves.
    """

    def __init__(self, opened: Opened, holder: "Holder[ChannelArena]") -> None:
        super().__init__(opened.sizes)
        self.link = opened.link
        self.sending = threading.Lock()
        self.waiters = Waiters(self.link, self._on_news)
        self.holder = holder
        self._opened = opened
        self._abandoned: dict[int, int] = {}  # place -> its request, whose caller has gone
        self._gpu = None if opened.device is None else GpuPlaces(opened.device)

    def is_usable(self) -> bool:
        """Whether the server still has it; False in a forked child, and in another event loop."""
        return self.waiters.are_here() and self.link.is_alive()

    def abandon(self, place: int, sequence: int) -> None:
        """The caller of a request has gone: its place is free once there is an answer."""
        self._abandoned[place] = sequence

    def reclaim(self) -> bool:
        """Make places of abandoned requests free; False if some have no answer."""
        for place, sequence in list(self._abandoned.items()):
            if self.link.is_answered(sequence):
                self.link.drop_answer(sequence)
                del self._abandoned[place]
                self.free.append(place)
        return not self._abandoned

    def break_off(self) -> None:
        """End the connection, as if the server had."""
        self.link.hang_up()

    def close(self) -> None:
        """Close the channel; the server frees its memory after the step that runs, if it is in it."""
        if self._opened.device is not None and not self.reclaim():
            _kept.append(self._opened.device)  # freeing it under a step would be undefined
        self.waiters.close()

    def check(self, call: LayerCall) -> None:
        """Raises InvalidRequestError for shapes that are not the layer's."""
        rows = call.shape[0]
        if call.shape[1] != self._opened.hidden_size:
            expected = [rows, self._opened.hidden_size]
            raise InvalidRequestError(f"shape of hidden_states: expected {expected}, got {list(call.shape)}")
        if len(call.inputs) > 1 and call.inputs[1].shape[1] != self._opened.top_k:
            got = list(call.inputs[1].shape)
            raise InvalidRequestError(f"shape of topk_ids: expected {[rows, self._opened.top_k]}, got {got}")

    def fill(self, call: LayerCall, place: int, deadline: Deadline) -> bytes:
        """Copy a call's inputs to a place; its request line without sequence. Raises InvalidRequestError."""
        self.check(call)
        where = layout_of(call)
        start = place * self.sizes.place_bytes
        if self._gpu is not None:
            self._gpu.copy_in(start, call, where)
        elif self._opened.host is not None:
            copy_in(self._opened.host[start : start + where.num_bytes], call, where)
        timeout = deadline.microseconds()
        return REQUEST.pack(
            call.shape[0],
            CODES[call.inputs[0].datatype],
            CODES[call.output.datatype],
            ROUTED if len(call.inputs) > 1 else 0,
            0 if timeout is None else -(-timeout // _TIMEOUT_UNIT) * _TIMEOUT_UNIT,
            start + where.hidden_states,
            start + where.topk_ids,
            start + where.topk_weights,
            start + where.output,
            call.priority,
            0,  # the model
        )

    def fetch(self, call: LayerCall, place: int) -> None:
        """Copy a call's output from its place."""
        where = layout_of(call)
        start = place * self.sizes.place_bytes
        if self._gpu is not None:
            self._gpu.copy_out(start, call, where)
        elif self._opened.host is not None:
            copy_out(self._opened.host[start : start + where.num_bytes], call, where)

    def _on_news(self) -> None:
        if self._abandoned or not self.link.is_open:
            self.holder.wake()
