"""The places of an open channel as arrays, and requests in flight."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from expertd_client.arrays import FLOATS
from expertd_client.channel.layout import TIMEOUT_OFFSET, WORD_BYTES
from expertd_client.channel.opening import Opened
from expertd_client.channel.waiting import Waiters
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError
from expertd_client.gpu_places import typed
from expertd_client.places import CallLayout, layout

if TYPE_CHECKING:
    import torch

_NUMPY = {"FP32": np.float32, "FP16": np.float16, "BF16": np.uint16}
_NAMES = {datatype: name for name, datatype in FLOATS.items()}


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """A request in flight."""

    slot: "Slot"
    num_tokens: int
    deadline: Deadline
    waiters: Waiters  # of the channel that it is sent over
    line: bytes
    sequence: int = 0  # once it is sent
    error: ExpertError | None = None
    is_done: bool = False
    is_late: bool = False  # a wait for it has ended without an answer
    times: tuple[float, float] | None = None

    @property
    def queue_seconds(self) -> float:
        """On the server until its step began; 0 until it has been waited for."""
        return self._times()[0]

    @property
    def compute_seconds(self) -> float:
        """Of its step; 0 until it has been waited for.

        The server measures both after the answer: the first access may wait for them, for microseconds. NaN
        if another request has used the slot meanwhile.
        """
        return self._times()[1]

    @property
    def is_lost(self) -> bool:
        """Whether its server has gone without an answer."""
        link = self.waiters.link
        return (
            bool(self.sequence) and not self.is_done and not (link.is_open or link.is_answered(self.sequence))
        )

    def again(self) -> None:
        """To be sent once more, with what is left of its time."""
        self.sequence, self.is_done, self.error = 0, False, None
        if (left := self.deadline.microseconds()) is not None:
            end = TIMEOUT_OFFSET + WORD_BYTES
            self.line = self.line[:TIMEOUT_OFFSET] + left.to_bytes(WORD_BYTES, "little") + self.line[end:]

    def __repr__(self) -> str:
        state = "in flight" if not self.is_done else "answered" if self.error is None else "failed"
        return f"Ticket(slot={self.slot.index}, num_tokens={self.num_tokens}, {state})"

    def _times(self) -> tuple[float, float]:
        if not self.is_done:
            return 0.0, 0.0
        if self.times is None:
            self.times = self.waiters.link.times(self.sequence) or (math.nan, math.nan)
        return self.times


@dataclass(slots=True, eq=False, repr=False)
class Slot:
    """Memory of one request at a time, shared with the server. A request uses the first rows of each array.

    hidden_states  [max_tokens, hidden_size] of the channel's datatype
    topk_ids       [max_tokens, top_k] int32
    topk_weights   [max_tokens, top_k] float32
    output         [max_tokens, hidden_size] of the channel's output datatype
    """

    index: int
    hidden_states: Any
    topk_ids: Any
    topk_weights: Any
    output: Any
    ticket: Ticket | None = None
    enqueued: object = None  # the request for which no stream waits yet
    lines: dict[tuple[int, int, float | str | None, int], bytes] = field(default_factory=dict)
    views: dict[int, tuple[Any, Any, Any, Any]] = field(default_factory=dict)

    def first(self, num_tokens: int) -> tuple[Any, Any, Any, Any]:
        """The rows of the first tokens in all four arrays. (Slicing a tensor takes 2 us.)"""
        views = self.views.get(num_tokens)
        if views is None:
            if len(self.views) >= _MAX_KEPT:
                self.views.clear()
            arrays = self.hidden_states, self.topk_ids, self.topk_weights, self.output
            one, two, three, four = [array[:num_tokens] for array in arrays]
            views = self.views[num_tokens] = one, two, three, four
        return views

    def rows(self, num_tokens: int) -> Any:
        """The output of the first tokens."""
        return self.first(num_tokens)[3]

    def __repr__(self) -> str:
        rows, columns = self.hidden_states.shape
        return f"Slot({self.index}, max_tokens={rows}, hidden_size={columns})"


_MAX_KEPT = 64


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of the arrays of every slot."""

    max_tokens: int
    hidden_size: int
    top_k: int
    datatype: str
    output_datatype: str

    @property
    def layout(self) -> CallLayout:
        """Where the arrays lie in a slot."""
        shape = self.max_tokens, self.hidden_size
        return layout(shape, self.top_k, self.datatype, self.output_datatype)


def make_slots(opened: Opened, shapes: Shapes, as_torch: bool) -> list[Slot]:
    """The slots of an opened channel: tensors if it is a GPU's or `as_torch`, else arrays."""
    starts = [index * opened.sizes.place_bytes for index in range(opened.sizes.num_places)]
    data, host = opened.device, opened.host
    if data is None and as_torch:
        import torch

        data = torch.from_numpy(host)
    if data is not None:
        return [torch_slot(data, index, start, shapes) for index, start in enumerate(starts)]
    assert host is not None
    return [numpy_slot(host, index, start, shapes) for index, start in enumerate(starts)]


def numpy_slot(data: "npt.NDArray[np.uint8]", index: int, start: int, shapes: Shapes) -> Slot:
    """The slot at `start` of host memory; BF16 as its bits, uint16."""

    def view(offset: int, dtype: Any, columns: int) -> npt.NDArray[Any]:
        size = shapes.max_tokens * columns * np.dtype(dtype).itemsize
        part = data[start + offset : start + offset + size].view(dtype)
        array: npt.NDArray[Any] = part.reshape(shapes.max_tokens, columns)
        return array

    where = shapes.layout
    return Slot(
        index,
        view(where.hidden_states, _NUMPY[shapes.datatype], shapes.hidden_size),
        view(where.topk_ids, np.int32, shapes.top_k),
        view(where.topk_weights, np.float32, shapes.top_k),
        view(where.output, _NUMPY[shapes.output_datatype], shapes.hidden_size),
    )


def torch_slot(data: "torch.Tensor", index: int, start: int, shapes: Shapes) -> Slot:
    """The slot at `start` of `data`, uint8 [n] on any device."""
    import torch

    def view(offset: int, dtype: "torch.dtype", columns: int) -> "torch.Tensor":
        return typed(data, start + offset, dtype, (shapes.max_tokens, columns))

    where = shapes.layout
    return Slot(
        index,
        view(where.hidden_states, getattr(torch, _NAMES[shapes.datatype]), shapes.hidden_size),
        view(where.topk_ids, torch.int32, shapes.top_k),
        view(where.topk_weights, torch.float32, shapes.top_k),
        view(where.output, getattr(torch, _NAMES[shapes.output_datatype]), shapes.hidden_size),
    )
