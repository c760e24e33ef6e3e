"""A caller whose data region is its own memory on a GPU, in a process of its own; prints its errors as JSON.

Arguments: the server's URL, the model, the caller's GPU. Compares with the same requests in host memory.
"""

import base64
import ctypes
import json
import sys

import httpx
import numpy as np
import torch
from cuda.bindings import runtime

from tests.service.apps import NUM_EXPERTS
from tests.service.channels.peer import Peer

TOKENS = (1, 5, 64, 300)
DTYPES = {"BF16": torch.bfloat16, "FP32": torch.float32}


class _Memory:
    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3
        }  # fmt: skip


def allocated(num_bytes: int) -> tuple[torch.Tensor, bytes]:
    """Bytes on the current GPU, and their handle."""
    status, pointer = runtime.cudaMalloc(num_bytes)
    assert not int(status)
    status, handle = runtime.cudaIpcGetMemHandle(pointer)
    assert not int(status)
    data = torch.as_tensor(_Memory(int(pointer), num_bytes), device="cuda")
    return data, ctypes.string_at(handle.getPtr(), 64)


def main() -> None:
    url, model, gpu = sys.argv[1:]
    torch.cuda.set_device(int(gpu))
    body = {"version": 3, "model": model, "num_slots": 2, "max_tokens": max(TOKENS), "datatype": "FP32"}
    on_host = Peer(httpx.post(f"{url}/v1/channels", json=body).json())
    size = on_host.data_bytes
    data, handle = allocated(size)
    memory = {
        "device_id": int(gpu),
        "raw_handle": {"b64": base64.b64encode(handle).decode()},
        "byte_size": size,
    }
    answer = httpx.post(f"{url}/v1/channels", json={**body, "memory": {"cuda": memory}}, timeout=60)
    assert answer.status_code == 201, answer.text
    peer = Peer(answer.json())
    errors = {}
    for datatype, dtype in DTYPES.items():
        for tokens in TOKENS:
            rows = torch.randn(tokens, peer.hidden_size).to(dtype)
            ids = torch.rand(tokens, NUM_EXPERTS).argsort(1)[:, : peer.top_k].to(torch.int32)
            given = ids, torch.rand(tokens, peer.top_k)
            for routing in ((), given):
                expected = ask_on_host(on_host, rows, datatype, *routing)
                got = ask(peer, data, rows, datatype, *routing)
                error = (got - expected).norm() / expected.norm()
                errors[f"{datatype} {tokens} {len(routing)}"] = error.item()
    print(json.dumps(errors))
    peer.close()
    on_host.close()


def ask(
    peer: Peer, data: torch.Tensor, rows: torch.Tensor, datatype: str, *routing: torch.Tensor
) -> torch.Tensor:
    """The output of a request in the GPU's memory, float32 on the host."""
    places = peer.places(peer.sequence + 1)
    for place, tensor in zip(places, (rows, *routing), strict=False):
        size = tensor.numel() * tensor.itemsize
        data[place : place + size] = tensor.cuda().view(torch.uint8).view(-1)
    torch.cuda.synchronize()
    answer = peer.wait(peer.send(len(rows), places, datatype, "FP32", routed=bool(routing)))
    assert answer.status == 200, answer.error
    return data[places[3] : places[3] + rows.numel() * 4].view(torch.float32).view(rows.shape).cpu()


def ask_on_host(peer: Peer, rows: torch.Tensor, datatype: str, *routing: torch.Tensor) -> torch.Tensor:
    """The output of the same request in host memory."""
    places = peer.places(peer.sequence + 1)
    for place, tensor in zip(places, (rows, *routing), strict=False):
        given = tensor.view(torch.uint8).numpy().ravel()
        peer.array(place, given.shape, np.uint8)[:] = given
    answer = peer.wait(peer.send(len(rows), places, datatype, "FP32", routed=bool(routing)))
    assert answer.status == 200, answer.error
    return torch.from_numpy(peer.array(places[3], tuple(rows.shape), np.float32).copy())


if __name__ == "__main__":
    main()
