"""Two servers of one function, for `benchmarks serving_cpu`: a plain Starlette route, and expertd.

The function of FP32 [tokens, 256] is y = x @ W, with one torch thread; that of BF16 is the identity. The
second server has channels, too, also over NIXL.
"""

import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from expertd.layout import Layout
from expertd.service.engine.layers import Cancelled
from expertd.service.engine.loading import LoadedLayers
from expertd.service.http.server import serve
from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult
from expertd.service.settings.model import Settings

COLUMNS = 256
W = torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(0))
_TOGETHER = 512  # requests of fewer tokens are multiplied together


async def infer(request: Request) -> Response:
    """The route that the server is compared with: the protocol in 20 lines, without any check."""
    body = await request.body()
    length = int(request.headers["inference-header-content-length"])
    given = json.loads(body[:length])["inputs"][0]
    data: bytes | memoryview = memoryview(body)[length:]
    if given["datatype"] == "FP32":
        x = np.frombuffer(data, np.float32).reshape(given["shape"])
        data = (torch.from_numpy(x) @ W).numpy().tobytes()
    parameters = {"binary_data_size": len(data)}
    output = {**given, "parameters": parameters}
    head = json.dumps({"model_name": "moe", "model_version": "1", "outputs": [output]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    return Response(b"".join((head, data)), media_type="application/octet-stream", headers=headers)


async def ready(_: Request) -> Response:
    """It is ready once it listens."""
    return Response()


class Done:
    """A step that is done when it begins."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def wait(self) -> float:
        return self._result.compute_seconds

    def finish(self) -> StepResult:
        return self._result


class Function:
    """The same function as a runner of expertd."""

    def validate(self, request: LayerRequest) -> None:
        """There is no routing to validate."""

    def begin(self, requests: Sequence[LayerRequest]) -> Done:
        """Compute a step."""
        start = time.perf_counter()
        tokens = sum(request.num_tokens for request in requests)
        if requests[0].datatype == "FP32" and tokens < _TOGETHER:
            outputs = _multiplied_together(requests)
        else:
            outputs = [_computed(request) for request in requests]
        seconds = time.perf_counter() - start
        return Done(StepResult(outputs, Layout.CONTIGUOUS, tokens, lambda: np.array([tokens, 0]), seconds))


def _multiplied_together(requests: Sequence[LayerRequest]) -> list[OutputMemory]:
    x = np.frombuffer(b"".join([host_view(request.hidden_states) for request in requests]), np.float32)
    y = torch.mm(torch.from_numpy(x.reshape(-1, COLUMNS)), W).numpy().data.cast("B")
    outputs: list[OutputMemory] = []
    begin = 0
    for request in requests:
        end = begin + request.num_tokens * 4 * COLUMNS
        outputs.append(y[begin:end])
        begin = end
    return outputs


def _computed(request: LayerRequest) -> OutputMemory:
    if request.datatype == "BF16":
        return host_view(request.hidden_states)
    x = torch.from_numpy(_rows(request.hidden_states))
    if request.output is None:
        return torch.mm(x, W).numpy().data.cast("B")
    torch.mm(x, W, out=torch.from_numpy(_rows(request.output)))
    return request.output


def _rows(memory: Buffer | Span) -> NDArray[np.float32]:
    return np.frombuffer(host_view(memory), np.float32).reshape(-1, COLUMNS)


def _load(settings: Settings, _: Cancelled) -> LoadedLayers:
    return LoadedLayers("reference", "cpu", {"moe": Function()}, None, lambda: None, lambda _: None)


def main() -> int:
    """Serve: `starlette` or `expertd`, the port, the model's hidden size."""
    name, port, hidden_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if name == "starlette":
        routes = [Route("/v2/models/moe/infer", infer, methods=["POST"]), Route("/v2/health/ready", ready)]
        app = Starlette(routes=routes)
        uvicorn.run(app, port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False)
        return 0
    model = {
        "name": "moe",
        "hidden_size": hidden_size,
        "intermediate_size": 128,
        "num_experts": 2,
        "top_k": 1,
    }
    limits, channels = {"max_body_bytes": 128 << 20}, {"nixl": True}
    given = {"port": port, "models": [model], "limits": limits, "channels": channels}
    return serve(Settings.model_validate(given), _load)


if __name__ == "__main__":
    sys.exit(main())
