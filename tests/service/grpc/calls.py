"""A gRPC server in the test's process, and calls to it with our own messages."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from expertd.service.engine.loading import Loader
from expertd.service.engine.steps import Runner
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.server import GrpcServer
from expertd.service.grpc.tables import SERVICE
from expertd.service.settings.model import Settings
from tests.service.apps import Serving, rows, serving, serving_runner, tiny_settings
from tests.service.runners import EchoRunner

ON = {"grpc": {"port": 0}}


class Calls:
    """A running server, and a connection to it."""

    def __init__(self, serving: Serving, server: GrpcServer, channel: Any) -> None:
        self.serving = serving
        self.server = server
        self.channel = channel
        self.engine = serving.app.engine

    def call(self, name: str, message: Any = None, data: bytes | None = None, **options: Any) -> Any:
        """A unary call, to be awaited; `data` is sent in place of a message."""
        sent = message if message is not None else CLASSES[f"{name}Request"]()
        method = self.channel.unary_unary(
            f"/{SERVICE}/{name}", response_deserializer=CLASSES[f"{name}Response"].FromString
        )
        return method(sent.SerializeToString() if data is None else data, **options)

    def infer(self, message: Any, **options: Any) -> Any:
        """ModelInfer, to be awaited."""
        return self.call("ModelInfer", message, **options)

    def stream(self, **options: Any) -> Any:
        """ModelStreamInfer, to be written and read."""
        return self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=CLASSES["ModelInferRequest"].SerializeToString,
            response_deserializer=CLASSES["ModelStreamInferResponse"].FromString,
        )(**options)


@asynccontextmanager
async def grpc_serving(
    runner: Runner, settings: Settings | None = None, loader: Loader | None = None
) -> AsyncIterator[Calls]:
    """The application of `settings` with this runner, or what a loader loads, over gRPC on a free port."""
    used = tiny_settings(**ON) if settings is None else settings
    async with serving(used, loader or serving_runner(runner)) as served:
        server = GrpcServer(served.app, used)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield Calls(served, server, channel)
        finally:
            await server.stop()


def hidden_message(
    values: npt.NDArray[np.float32], model: str = "tiny", request_id: str = "", **parameters: int
) -> Any:
    """A ModelInferRequest with raw hidden states."""
    message = CLASSES["ModelInferRequest"](model_name=model, id=request_id)
    message.inputs.add(name="hidden_states", datatype="FP32", shape=values.shape)
    message.raw_input_contents.append(values.tobytes())
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message


def output_of(response: Any) -> npt.NDArray[np.float32]:
    """The FP32 output of a ModelInferResponse."""
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("hidden_states", "FP32")
    (raw,) = response.raw_output_contents
    return np.frombuffer(raw, np.float32).reshape(output.shape)


async def refusal(call: Any, code: grpc.StatusCode) -> tuple[str, Mapping[str, str]]:
    """The text and the trailing metadata of a call that ends with `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    trailers = {str(name): str(value) for name, value in caught.value.trailing_metadata()}
    return caught.value.details() or "", trailers


async def held(calls: Calls, runner: EchoRunner) -> Any:
    """A request whose step runs until the runner's gate is opened."""
    runner.gate.clear()
    first = calls.infer(hidden_message(rows(3)))
    await runner.begun()
    return first
