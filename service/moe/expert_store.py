"""The experts of a layer in the host's memory, of which the device has those that were used last.

A step copies the experts that it lacks while those that are there are multiplied; in a CUDA graph, which runs
again once they are there. See docs/expert-store.md.
"""

import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.kernels import (
    Activation,
    Backend,
    ExpertBiases,
    ExpertPart,
    GroupTable,
    HiddenStates,
    PartsOfRank,
    fused_experts_in_parts,
)
from expertd.kernels.ops.four_bits import mapped
from expertd.service.device import Copies, Device, Event, Stream
from expertd.service.memory import Mapped
from expertd.service.moe.expert_budget import chunk_experts, chunk_sizes
from expertd.service.moe.needs import STORE_TOKEN_COUNTS, stored_shape
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.slot_table import Experts, Fetches, SlotTable
from expertd.service.moe.step.staging import GrowingBuffer
from expertd.service.moe.step.step_counts import StoreCounts
from expertd.service.moe.weights import ExpertWeights, empty_matrices
from expertd.weight_format import WeightLayout

OnRank = Callable[[Tensor, Callable[[], PartsOfRank]], None]
"""Calls `Backend.parallel_experts_in_parts` with these offsets and `parts_of`."""
_NO_FILE = -1  # the descriptor of memory without a file


class ExpertRoom(NamedTuple):
    """Room on the device for experts of a layer, to which copies are made.

    part     what calls take
    tensors  [G, ..] that they read, see `Backend.room`; then the biases
    """

    part: ExpertPart
    tensors: tuple[Tensor, ...]

    @property
    def is_packed(self) -> bool:
        """Whether the part has no data but in the tensors."""
        return self.part.down.data.is_meta


@dataclass
class _Chunk:
    """Room for a few experts of any layer of a size, while a step needs them."""

    room: ExpertRoom
    copied: Event
    free: Event


class StoreMemory:
    """What the stores of a process share: a stream for copies, and room for what does not fit into slots.

    Steps of one layer after another use it, on one thread.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.copies = device.new_stream()
        self.host_ids = GrowingBuffer(device, is_pinned=True)
        self.host_groups = GrowingBuffer(device, is_pinned=True)
        self.ids_copied, self.groups_copied = device.new_event(), device.new_event()
        self.counts: dict[str, StoreCounts] = {}
        """By model."""
        self._chunks: dict[Hashable, tuple[_Chunk, _Chunk]] = {}

    def chunks(self, shape: LayerShape, has_biases: bool, backend: Backend) -> tuple[_Chunk, _Chunk]:
        """The two chunks for layers of this size, all of one backend."""
        stored = stored_shape(shape, backend.capabilities)
        size, count = (*chunk_sizes(stored), has_biases), chunk_experts(stored)

        def new_chunk() -> _Chunk:
            room = new_room(shape, shape.weight_layout, count, has_biases, backend, self.device.tensors)
            return _Chunk(room, self.device.new_event(), self.device.new_event())

        if size not in self._chunks:
            self._chunks[size] = new_chunk(), new_chunk()
        return self._chunks[size]


class HostExperts:
    """The routed experts of a layer in the host's memory, from which the device can copy to room like `like`.

    part          the matrices and biases; None: they are packed
    tensors       [E, ..] as those of the room
    expert_bytes  of each
    """

    def __init__(
        self, weights: ExpertPart, num_experts: int, like: ExpertRoom, backend: Backend, device: Device
    ) -> None:
        sizes = [num_experts * tensor[0].nbytes for tensor in like.tensors]
        starts = np.cumsum([0, *(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)])
        # Not torch's pinned memory, of which it takes a power of two.
        memory = mmap.mmap(-1, int(starts[-1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.tensors = tuple(
            whole[start : start + size].view(tensor.dtype).view(num_experts, *tensor.shape[1:])
            for tensor, start, size in zip(like.tensors, starts, sizes, strict=False)
        )
        _write(self.tensors, weights, range(num_experts), backend, like)
        in_order = iter(self.tensors)
        self.part = None if like.is_packed else _mapped_part(weights, lambda _: next(in_order))
        self._sources = [(tensor.data_ptr(), tensor[0].nbytes) for tensor in self.tensors]
        self.expert_bytes = sum(size for _, size in self._sources)
        unregister = device.register(Mapped(whole.data_ptr(), whole.numel(), _NO_FILE))
        weakref.finalize(self, unregister).atexit = False

    def copies(self, experts: Sequence[int], to: ExpertRoom, places: Sequence[int]) -> Copies:
        """The copies of each expert to its place in a room."""
        copies = Copies()
        for (source, size), target in zip(self._sources, to.tensors, strict=True):
            address = target.data_ptr()
            for expert, place in zip(experts, places, strict=True):
                copies.add(address + place * size, source + expert * size, size, target)
        return copies


class _Pass(NamedTuple):
    """A part of a step's experts.

    copied  what it waits for; None: it is there
    chunk   where it is, to be given back; None: in slots
    """

    part: ExpertPart
    copied: Event | None = None
    chunk: _Chunk | None = None


class ExpertStore:
    """The experts of one layer: all in the host's memory, some in slots of the device, and the shared ones.

    num_slots  of routed experts
    host       the routed experts in the host's memory
    room       the experts on the device: those in slots, then the shared ones
    slots      what calls take of them
    shared     the shared ones, if they have another layout; then `slots` does not have them
    counts     what steps did

    A backend that packs has its experts packed in all of these, once, on the device. Raises ValueError if it
    cannot.
    """

    def __init__(
        self, memory: StoreMemory, name: str, shape: LayerShape, weights: ExpertWeights, num_slots: int,
        backend: Backend,
    ) -> None:  # fmt: skip
        held, self._device = len(shape.held_experts), memory.device
        self._memory, self._shape, self._backend = memory, shape, backend
        self.num_slots = num_slots
        whole, has_biases = ExpertPart(weights.gate_up, weights.down, weights.biases), bool(weights.biases)
        beside = 0 if shape.splits_shared else shape.num_shared_experts
        to = self._device.tensors
        self.room = new_room(shape, shape.weight_layout, num_slots + beside, has_biases, backend, to)
        self.slots = self.room.part
        self.host = HostExperts(whole, held, self.room, backend, self._device)
        in_room = tuple(tensor[num_slots:] for tensor in self.room.tensors)
        _write(in_room, whole, range(held, held + beside), backend, self.room)
        self.shared = None
        if weights.shared is not None:
            count = shape.num_shared_experts
            room = new_room(shape, shape.shared_layout, count, weights.shared.biases is not None, backend, to)
            _write(room.tensors, weights.shared, range(count), backend, room)
            self.shared = room.part
        packs = backend.capabilities.packs - backend.capabilities.stores_packed
        self._prepares = shape.weight_layout.format in packs  # it keeps matrices of what is in slots
        self._chunks = memory.chunks(shape, has_biases, backend)
        self._table = SlotTable(held, num_slots)
        self._places = np.arange(shape.num_groups + 2)  # of experts, by id + 1; at both ends those of none
        self.counts = memory.counts.setdefault(name, StoreCounts())
        self._used, self._slots_copied = self._device.new_event(), self._device.new_event()
        most_ids = STORE_TOKEN_COUNTS[-1] * (shape.top_k + shape.num_shared_experts)
        self._groups = GroupTable(
            torch.empty(shape.num_groups, dtype=torch.int32, device=self._device.tensors),
            self._device.pinned(1 + most_ids, dtype=torch.int32).zero_(),
        )
        self._seen = self._groups.seen.numpy()
        self._host_groups = self._device.pinned(shape.num_groups, dtype=torch.int32)
        self._host_groups[held:] = torch.arange(num_slots, num_slots + shape.num_shared_experts)
        self._host_offsets = self._device.pinned(held + 1, dtype=torch.int32)
        self._groups_of: Experts | None = None  # the table's `expert_in` that `_groups` has
        self._groups_copied = self._device.new_event()
        self._waits = deque[tuple[Event, Event]]()  # of steps: before and after
        self._device.synchronize()

    def on_device(self, weights: ExpertWeights) -> ExpertWeights:
        """Weights of which the device has the store's experts, instead of all."""
        own = replace(weights, gate_up=self.slots.gate_up, down=self.slots.down, shared=self.shared)
        return replace(own, biases=self.slots.biases)

    def in_host_memory(self, weights: ExpertWeights) -> ExpertWeights:
        """Weights with the routed experts in the host's memory; say so by `changed` if one is overwritten.

        Packed ones cannot be: they stay without data.
        """
        if (part := self.host.part) is None:
            return weights
        return replace(weights, gate_up=part.gate_up, down=part.down, biases=part.biases, shared=None)

    def changed(self, expert: int) -> None:
        """The next step that needs this expert copies it; between two steps."""
        self._table.remove(expert)

    def __call__(
        self,
        hidden_states: HiddenStates,
        group_ids: Tensor,
        topk_weights: Tensor,
        activation: Activation,
        num_sms: int | None,
        out: Tensor | None,
        offsets: Tensor | None,
    ) -> Tensor:
        """As `fused_experts` with all experts, and bitwise its result. Waits for group_ids."""
        try:
            return self._run(hidden_states, group_ids, topk_weights, activation, num_sms, out, offsets)
        except BaseException:
            self._table.clear()  # copies may not have been made
            raise

    def on_rank(self, call: OnRank, offsets: Tensor | None) -> None:
        """A call of several ranks for the experts of this one, without shared ones. Waits for its offsets.

        offsets  int32 [G + 1] to write to; None: nowhere
        """
        written = self._host_offsets.zero_()  # the call before has been waited for
        try:
            call(written, partial(self._parts_of_rank, written))
        except BaseException:
            self._table.clear()  # copies may not have been made
            raise
        if offsets is not None:
            offsets.copy_(written)

    def in_slots(
        self,
        hidden_states: HiddenStates,
        group_ids: Tensor,
        topk_weights: Tensor,
        activation: Activation,
        num_sms: int | None,
        out: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """As a call, for a CUDA graph: the device finds the experts in slots. Waits for nothing.

        group_ids  int32, of at most the last of STORE_TOKEN_COUNTS tokens
        offsets    int32 [MAX_GROUPS + 1] or longer, pinned, for those of slots and shared experts

        Before each replay call `begin_in_slots`. At its end, out is undefined if `lacks_experts`.
        """
        parts = [self.slots] if self.shared is None else [self.slots, self.shared]
        num_groups = sum(part.num_groups for part in parts)
        return fused_experts_in_parts(
            hidden_states, group_ids, topk_weights, parts, num_groups, num_experts=self._shape.num_groups,
            out=out, activation=activation, backend=self._backend, num_sms=num_sms,
            offsets=offsets[: num_groups + 1], table=self._groups,
        )  # fmt: skip

    def begin_in_slots(self, stream: Stream) -> Experts:
        """Have a replay on this stream, the current one, find the slots as they are; the experts in them.

        The one before has ended.
        """
        self._seen[0] = 0
        if self._groups_of is not self._table.expert_in:
            self._groups_copied.synchronize()  # `_host_groups` may still be read
            self._host_groups.numpy()[: len(self._table.slot_of)] = self._table.slot_of
            copy, to = Copies(), self._groups.groups
            copy.add(to.data_ptr(), self._host_groups.data_ptr(), to.nbytes, None)
            self._device.copy(copy, stream)
            self._groups_copied.record(stream)
            self._groups_of = self._table.expert_in
        return self._table.expert_in

    @property
    def lacks_experts(self) -> bool:
        """Whether the last replay, which has ended, needed experts that were in no slot."""
        return bool(self._seen[0])

    def fetch_seen(self, num_tokens: int, stream: Stream) -> bool:
        """Copy what the last replay of `num_tokens` lacked to slots, for which the stream then waits.

        False: more experts than slots are needed, and nothing was done.
        """
        num_ids = num_tokens * (self._shape.top_k + self._shape.num_shared_experts)
        tokens = self._tokens(np.take(self._places, self._seen[1 : 1 + num_ids] + 1, mode="clip"))
        routed = tokens[: len(self._table.slot_of)]
        if not self._table.has_room(routed):
            return False
        try:
            fetches = self._take(routed, stream)
            if len(fetches.fetched):  # another step may have fetched them
                self._wait(self._slots_copied, stream)
        except BaseException:
            self._table.clear()
            raise
        return True

    def note_in_slots(self, offsets: NDArray[np.int32], experts: Experts) -> None:
        """Count a replay that lacked nothing, and note what it used.

        offsets  that it wrote
        experts  from `begin_in_slots`
        """
        used = np.flatnonzero(offsets[1 : self.num_slots + 1] > offsets[: self.num_slots])
        self._table.use(used, experts)
        self.counts.hits += len(used)
        self._note_waits()

    def offsets_of_experts(self, offsets: NDArray[np.int32], experts: Experts) -> NDArray[np.int32]:
        """int32 [G + 1], as a call writes them; offsets and experts as in `note_in_slots`."""
        held, num_groups = len(self._table.slot_of), self._shape.num_groups
        tokens, counts = (
            np.zeros(num_groups, np.int32),
            np.diff(offsets[: self.num_slots + num_groups - held + 1]),
        )
        kept = np.flatnonzero(experts >= 0)
        tokens[experts[kept]], tokens[held:] = counts[kept], counts[self.num_slots :]
        return _sums(tokens)

    def _run(
        self,
        hidden_states: HiddenStates,
        group_ids: Tensor,
        topk_weights: Tensor,
        activation: Activation,
        num_sms: int | None,
        out: Tensor | None,
        offsets: Tensor | None,
    ) -> Tensor:
        stream = self._device.current_stream()
        ids = self._on_host(group_ids, stream)
        held, num_groups = len(self._table.slot_of), self._shape.num_groups
        at = np.take(self._places, ids + 1, mode="clip")
        tokens = self._tokens(at)
        fetches = self._take(tokens[:held], stream)  # before the rest, which the host does while copies run
        passes, group_of = self._passes(fetches)
        groups = self._to_device(group_of[at], stream)
        if offsets is not None:
            offsets.copy_(torch.from_numpy(_sums(tokens)))
        self._note_waits()
        return fused_experts_in_parts(
            hidden_states, groups, topk_weights, self._parts(passes, fetches.streamed, stream),
            sum(each.part.num_groups for each in passes),
            num_experts=num_groups, out=out, activation=activation, backend=self._backend, num_sms=num_sms,
        )  # fmt: skip

    def _parts_of_rank(self, offsets: Tensor) -> PartsOfRank:
        """For `Backend.parallel_experts_in_parts`; `offsets` is written by what the stream has."""
        stream, written = self._device.current_stream(), self._memory.ids_copied
        written.record(stream)
        written.synchronize()
        before = offsets.numpy()
        tokens = np.maximum(np.diff(before), 0)  # undefined if a rank was late
        fetches = self._take(tokens, stream)
        passes, group_of = self._passes(fetches)
        groups, used = group_of[1 : len(tokens) + 1], np.flatnonzero(tokens)
        rows = np.zeros(sum(each.part.num_groups for each in passes), np.int32)
        rows[groups[used]] = tokens[used]
        after, shifts = _sums(rows), np.zeros(len(tokens), np.int32)
        shifts[used] = after[groups[used]] - before[used]
        sent = self._to_device(np.concatenate((after, shifts)), stream)
        self._note_waits()
        return PartsOfRank(self._parts(passes, fetches.streamed, stream), *sent.tensor_split([len(after)]))

    def _tokens(self, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """Tokens of each of the layer's experts [G], from the places of ids in `_places`."""
        return np.bincount(places.ravel(), minlength=len(self._places))[1:-1]

    def _take(self, tokens: NDArray[np.intp], stream: Stream) -> Fetches:
        """`SlotTable.take`, with copies to slots after what the stream has; counts experts."""
        fetches = self._table.take(tokens)
        if len(fetches.fetched):
            self._used.record(stream)
            self._fetch(fetches.fetched, self.room, fetches.slots, self._used, self._slots_copied)
        self.counts.hits += len(fetches.present)
        self.counts.misses += len(fetches.fetched) + len(fetches.streamed)
        return fetches

    def _passes(self, fetches: Fetches) -> tuple[list[_Pass], NDArray[np.int32]]:
        """A step's passes, and int32 the group in them of each expert of the layer, by id + 1; -1: none."""
        held, num_groups, slots = len(self._table.slot_of), self._shape.num_groups, self.slots
        group_of = np.full(num_groups + 2, -1, np.int32)
        passes, first = list[_Pass](), 0
        if len(fetches.present) or slots.num_groups > self.num_slots or not len(fetches.fetched):
            passes.append(_Pass(slots))
            group_of[fetches.present + 1] = self._table.slot_of[fetches.present]
            if self.shared is None:
                group_of[held + 1 : -1] = np.arange(self.num_slots, slots.num_groups)
            first = slots.num_groups
        if self.shared is not None:
            passes.append(_Pass(self.shared))
            group_of[held + 1 : -1] = first + np.arange(self.shared.num_groups)
            first += self.shared.num_groups
        if len(fetches.fetched):
            passes.append(_Pass(slots, self._slots_copied))
            group_of[fetches.fetched + 1] = first + fetches.slots
            first += slots.num_groups
        group_of[fetches.streamed + 1] = first + np.arange(len(fetches.streamed))
        size = self._chunks[0].room.part.num_groups
        for number in range(-(-len(fetches.streamed) // size)):
            passes.append(_Pass((chunk := self._chunks[number % 2]).room.part, chunk.copied, chunk))
        return passes, group_of

    def _parts(self, passes: Sequence[_Pass], streamed: Experts, stream: Stream) -> Iterator[ExpertPart]:
        """The parts of a step, one pass after another; copies are enqueued as soon as there is room."""
        size = self._chunks[0].room.part.num_groups
        left = iter(np.split(streamed, range(size, len(streamed), size)) if len(streamed) else ())

        def fetch_next(chunk: _Chunk) -> None:
            if (experts := next(left, None)) is not None:
                self._fetch(experts, chunk.room, np.arange(len(experts)), chunk.free, chunk.copied)

        for chunk in self._chunks:
            fetch_next(chunk)
        for part, copied, used in passes:
            if copied is not None:
                self._wait(copied, stream)
            yield part
            if used is not None:
                used.free.record(stream)
                fetch_next(used)

    def _fetch(self, experts: Experts, to: ExpertRoom, places: Experts, free: Event, copied: Event) -> None:
        """Copy experts to places in a room once `free` has passed; then comes `copied`."""
        if not len(experts):
            return
        began, stream, at = time.perf_counter(), self._memory.copies, places.tolist()
        copies = self.host.copies(experts.tolist(), to, at)
        stream.wait_event(free)
        self._device.copy(copies, stream)
        copied.record(stream)
        self.counts.num_bytes += len(experts) * self.host.expert_bytes
        pairs = () if self.host.part is None else zip(to.part.matrices, self.host.part.matrices, strict=True)
        for matrix, kept in pairs if self._prepares else ():
            prepared = [self._backend.prepare_weights(mapped(kept, itemgetter(expert))) for expert in experts]
            self._backend.weights_changed(matrix, at, prepared)
        if self._device.is_host:  # which waits for its copies here
            self.counts.wait_seconds += time.perf_counter() - began

    def _wait(self, copied: Event, stream: Stream) -> None:
        """Have the stream wait, and time it."""
        before, after = self._device.new_event(timing=True), self._device.new_event(timing=True)
        before.record(stream)
        stream.wait_event(copied)
        after.record(stream)
        if not self._device.is_host:
            self._waits.append((before, after))

    def _note_waits(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self.counts.wait_seconds += before.elapsed_time(after) / 1e3

    def _on_host(self, ids: Tensor, stream: Stream) -> NDArray[np.int32]:
        """int32 ids, once the stream has them."""
        if self._device.is_host:
            return ids.numpy()
        memory = self._memory
        on_host = memory.host_ids.take(ids.nbytes).view(torch.int32).view(ids.shape)
        on_host.copy_(ids, non_blocking=True)
        memory.ids_copied.record(stream)
        memory.ids_copied.synchronize()
        return on_host.numpy()

    def _to_device(self, numbers: NDArray[np.int32], stream: Stream) -> Tensor:
        if self._device.is_host:
            return torch.from_numpy(numbers)
        memory = self._memory
        memory.groups_copied.synchronize()  # of the step before
        on_host = memory.host_groups.take(numbers.nbytes).view(torch.int32).view(numbers.shape)
        np.copyto(on_host.numpy(), numbers)
        made = torch.empty_like(on_host, device=self._device.tensors)
        made.copy_(on_host, non_blocking=True)
        memory.groups_copied.record(stream)
        return made


def new_room(
    shape: LayerShape,
    layout: WeightLayout,
    num_groups: int,
    has_biases: bool,
    backend: Backend,
    device: torch.device,
) -> ExpertRoom:
    """Room for experts of a layer, in one of its layouts, filled with zeros."""
    h, i = shape.hidden_size, shape.intermediate_size
    gate_up, first = backend.room(empty_matrices(layout, num_groups, 2 * i, h, "meta"), device, pairs=True)
    down, second = backend.room(empty_matrices(layout, num_groups, h, i, "meta"), device)
    biases = None
    if has_biases:
        pair = (torch.zeros((num_groups, n), dtype=torch.bfloat16, device=device) for n in (2 * i, h))
        biases = ExpertBiases(*pair)
    return ExpertRoom(ExpertPart(gate_up, down, biases), (*first, *second, *(biases or ())))


def _write(
    to: Sequence[Tensor], weights: ExpertPart, experts: range, backend: Backend, like: ExpertRoom
) -> None:
    """Write experts, on the host, to tensors like those of a room. Packs one after another on its device."""
    step = 1 if like.is_packed else max(1, len(experts))
    for first in experts[::step]:
        groups, places = (
            slice(first, first + step),
            slice(first - experts.start, first - experts.start + step),
        )
        part = _mapped_part(weights, itemgetter(groups))
        if like.is_packed:
            part = _mapped_part(part, lambda tensor: tensor.to(like.tensors[0].device))
        gate_up = backend.contents(part.gate_up, pairs=True, first=first)
        made = *gate_up, *backend.contents(part.down, first=first), *(part.biases or ())
        for target, source in zip(to, made, strict=True):
            target[places].view(torch.uint8).copy_(source.view(torch.uint8))


def _sums(tokens: NDArray[np.signedinteger[Any]]) -> NDArray[np.int32]:
    """The offsets [G + 1] of groups with these tokens [G]."""
    sums = np.zeros(len(tokens) + 1, np.int32)
    np.cumsum(tokens, out=sums[1:])
    return sums


def _mapped_part(part: ExpertPart, change: Callable[[Tensor], Tensor]) -> ExpertPart:
    """With each tensor changed: of gate_up, of down, and the biases."""
    gate_up, down = (mapped(matrix, change) for matrix in part.matrices)
    return ExpertPart(gate_up, down, part.biases and ExpertBiases(*map(change, part.biases)))
