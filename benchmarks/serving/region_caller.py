"""Callers over HTTP whose tensors lie in shared memory: Triton's system or CUDA regions.

Each caller has a region of its own with the input before the output. Latency is from the first byte of the
request to the last one of the answer; the tensors are written before.
"""

import base64
import json
import sys
import urllib.request
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from benchmarks.serving.http_caller import infer_request, run


def tokens_of(num_tokens: int, hidden_size: int) -> "np.ndarray[Any, np.dtype[np.uint16]]":
    """The bits of the bfloat16 tokens that all callers send."""
    rows = np.random.default_rng(num_tokens).standard_normal((num_tokens, hidden_size), dtype=np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


def register(url: str, kind: str, name: str, **region: object) -> None:
    """Register a region; raises urllib's HTTPError if the server refuses it."""
    target = f"{url}/v2/{kind}sharedmemory/region/{name}/register"
    urllib.request.urlopen(urllib.request.Request(target, json.dumps(region).encode())).read()


def system_region(url: str, tokens: "np.ndarray[Any, np.dtype[np.uint16]]") -> shared_memory.SharedMemory:
    """A region of the host's memory, which the caller must keep."""
    region = shared_memory.SharedMemory(create=True, size=2 * tokens.nbytes)
    assert region.buf is not None
    np.frombuffer(region.buf, np.uint16, tokens.size)[:] = tokens.ravel()
    register(url, "system", "benchmark", key=f"/{region.name}", offset=0, byte_size=2 * tokens.nbytes)
    return region


def cuda_region(url: str, tokens: "np.ndarray[Any, np.dtype[np.uint16]]", device: int) -> None:
    """A region of a GPU's memory, which lives as long as this process."""
    from cuda.bindings import runtime

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) > 1 else None

    checked(runtime.cudaSetDevice(device))
    memory = checked(runtime.cudaMalloc(2 * tokens.nbytes))
    kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
    checked(runtime.cudaMemcpy(memory, tokens.ctypes.data, tokens.nbytes, kind))
    checked(runtime.cudaDeviceSynchronize())
    handle = checked(runtime.cudaIpcGetMemHandle(memory))
    encoded = base64.b64encode(bytes(handle.reserved)).decode()
    register(
        url, "cuda", "benchmark",
        raw_handle={"b64": encoded}, device_id=device, byte_size=2 * tokens.nbytes,
    )  # fmt: skip


def main() -> None:
    """Reads {url, port, model, tokens, hidden_size, device, connections, seconds}; prints latencies."""
    given = json.loads(sys.stdin.readline())
    tokens, region = tokens_of(given["tokens"], given["hidden_size"]), None
    kind = "system" if given["device"] is None else "cuda"
    if given["device"] is None:
        region = system_region(given["url"], tokens)
    else:
        cuda_region(given["url"], tokens, int(given["device"].removeprefix("cuda:")))
    place = {"shared_memory_region": "benchmark", "shared_memory_byte_size": tokens.nbytes}
    request = infer_request(
        given["model"], given["tokens"], given["hidden_size"],
        input=place, output={**place, "shared_memory_offset": tokens.nbytes},
    )  # fmt: skip
    latencies = run(given["port"], request, 1, given["connections"], given["seconds"])
    target = f"{given['url']}/v2/{kind}sharedmemory/region/benchmark/unregister"
    urllib.request.urlopen(urllib.request.Request(target, b"")).read()
    if region is not None:
        region.close()
        region.unlink()
    print(json.dumps(latencies))


if __name__ == "__main__":
    main()
