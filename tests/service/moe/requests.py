"""Requests for runners, whose tensors lie in any kind of memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest, OutputMemory

DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
Place = Callable[[Tensor], Buffer | Span]


def as_bytes(tensor: Tensor) -> bytes:
    """A copy that the step has to copy again."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def pinned(tensor: Tensor) -> Span:
    """A copy in pinned memory, which the GPU reads in place."""
    copy = tensor.cpu().contiguous().pin_memory().view(torch.uint8).view(-1)
    view = memoryview(copy.numpy())  # type: ignore[arg-type]
    return Span(copy.data_ptr(), copy.numel(), None, view, copy)


def on_gpu(tensor: Tensor, past: int = 0) -> Span:
    """A copy in the GPU's memory, `past` bytes after an aligned address."""
    data = tensor.cuda().contiguous().view(torch.uint8).view(-1)
    copy = torch.empty(past + data.numel(), dtype=torch.uint8, device=data.device)[past:]
    copy.copy_(data)
    torch.cuda.synchronize()
    return Span(copy.data_ptr(), copy.numel(), copy.get_device(), None, copy)


def layer_request(
    tokens: Tensor,
    datatype: str = "BF16",
    routing: tuple[Tensor, Tensor] | None = None,
    place: Place = as_bytes,
    output_datatype: str = "FP32",
    into: Place | None = None,
) -> LayerRequest:
    """A request for tokens [T, H], with topk_ids (int32 or int64) and topk_weights, and its output `into`."""
    ids, weights = (None, None) if routing is None else (place(tensor) for tensor in routing)
    output: Any = None
    if into is not None:
        output = into(torch.full_like(tokens, torch.nan, dtype=DTYPES[output_datatype]))
    return LayerRequest(
        num_tokens=len(tokens),
        hidden_states=place(tokens.to(DTYPES[datatype])),
        datatype=datatype,
        topk_ids=ids,
        topk_ids_datatype="INT64" if routing is not None and routing[0].dtype == torch.int64 else "INT32",
        topk_weights=weights,
        output_datatype=output_datatype,
        output=output,
    )


def rows_of(output: OutputMemory, datatype: str, hidden_size: int) -> Tensor:
    """An output's rows [T, H], on the host."""
    if isinstance(output, Span) and output.device is not None:
        assert isinstance(output.owner, Tensor)
        data = output.owner.cpu()
    else:
        data = torch.frombuffer(bytearray(host_view(output)), dtype=torch.uint8)
    return data.view(DTYPES[datatype]).view(-1, hidden_size)
