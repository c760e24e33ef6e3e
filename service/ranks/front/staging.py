"""Shared memory for the tensors of a step that are bytes, and for outputs without memory of their own."""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from expertd.service.engine.errors import RequestRefusedError, SomeRefusedError
from expertd.service.memory import Buffer, Mapped, Register, Span, host_view
from expertd.service.moe.request import LayerRequest, StepPlan
from expertd.service.ranks.messages import NOWHERE, Place, PlacedRequest, numbered, packed_body
from expertd.service.ranks.regions import SharedRegions

_ALIGNMENT = 64
_BYTES = {"BF16": 2, "FP16": 2, "FP32": 4}


def staging_bytes(max_tokens: int, hidden_size: int, top_k: int) -> int:
    """Enough for any step: hidden states and outputs in FP32, 64-bit ids, FP32 weights, one token each."""
    sizes = (4 * hidden_size, 8 * top_k, 4 * top_k, 4 * hidden_size)
    return max_tokens * sum(size + _ALIGNMENT for size in sizes)


class StagingRegion:
    """`num_bytes` for one step at a time. The kernel allocates pages on their first use."""

    def __init__(self, num_bytes: int, register: Register) -> None:
        descriptor = os.memfd_create("expertd-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            mapped = mmap.mmap(descriptor, num_bytes)
            self._view = memoryview(mapped)
            self._address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
            self.close = register(Mapped(self._address, num_bytes, descriptor))
        finally:
            os.close(descriptor)
        self._used = 0

    def clear(self) -> None:
        """Begin another step."""
        self._used = 0

    @property
    def is_clear(self) -> bool:
        """Whether the step has taken nothing."""
        return self._used == 0

    def take(self, num_bytes: int) -> tuple[int, memoryview]:
        """(address, bytes) of a part that is not used yet."""
        start = self._used
        self._used = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._address + start, self._view[start : start + num_bytes]


class StagedStep:
    """The requests of a step, placed: spans where they are, all else in `staging`.

    Raises ValueError for a span that the ranks do not share.
    """

    def __init__(
        self,
        requests: Sequence[LayerRequest],
        hidden_size: int,
        staging: StagingRegion,
        regions: SharedRegions,
    ) -> None:
        self._requests, self._hidden_size = requests, hidden_size
        self._staging, self._regions = staging, regions
        self._outputs: list[memoryview | None] = []  # of requests without memory of their own
        staging.clear()

    def command(self, number: int, model: int) -> bytes:
        """The command that makes the ranks run the step. Raises SomeRefusedError."""
        request, alone = self._requests[0], len(self._requests) == 1
        state = model, self._regions.changes  # after others, places may be wrong
        if alone and (planned := request.planned(self._regions, state)) is not None:
            self._outputs.append(None)  # a request with a plan has memory of its own
            return numbered(number, planned)
        placed, refused = [], {}
        for place, each in enumerate(self._requests):
            try:
                placed.append(self._placed(each))
            except RequestRefusedError as error:
                refused[place] = error
        if refused:
            raise SomeRefusedError(refused)
        body = packed_body(model, placed)
        if alone and self._staging.is_clear:  # nothing of the request is copied
            request.plan = StepPlan(self._regions, state, body)
        return numbered(number, body)

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self._requests)

    def outputs(self) -> list[bytes | Span]:
        """Each request's output, once the ranks have written it; the staging memory is free afterwards."""
        outputs: list[bytes | Span] = []
        for request, staged in zip(self._requests, self._outputs, strict=True):
            if staged is not None:
                outputs.append(bytes(staged))
            else:
                assert request.output is not None
                outputs.append(request.output)
        return outputs

    def _placed(self, request: LayerRequest) -> PlacedRequest:
        if request.output is None:
            size = request.num_tokens * self._hidden_size * _BYTES[request.output_datatype]
            address, staged = self._staging.take(size)
            self._outputs.append(staged)
            output = self._regions.place(address, size)
        else:
            self._outputs.append(None)
            output = self._regions.place(request.output.address, request.output.num_bytes)
        return PlacedRequest(
            request.num_tokens,
            request.datatype,
            request.topk_ids_datatype,
            request.output_datatype,
            self._place(request.hidden_states),
            self._place(request.topk_ids),
            self._place(request.topk_weights),
            output,
            self._place(request.scales),
        )

    def _place(self, tensor: Buffer | Span | None) -> Place:
        if tensor is None:
            return NOWHERE
        if isinstance(tensor, Span):
            return self._regions.place(tensor.address, tensor.num_bytes)
        view = host_view(tensor).cast("B")
        address, staged = self._staging.take(len(view))
        staged[:] = view
        return self._regions.place(address, len(view))
