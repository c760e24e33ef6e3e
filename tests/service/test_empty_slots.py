"""Slots without an expert (ids of -1 and num_experts), by every way in: they add nothing, and are counted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.server import GrpcServer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import diff
from tests.service.apps import (
    MODEL,
    NUM_EXPERTS,
    TOP_K,
    Serving,
    binary_request,
    error_of,
    json_input,
    json_request,
    output_of,
    rows,
    serving,
    tiny_settings,
)
from tests.service.channels.peer import Peer
from tests.service.channels.servers import claimed
from tests.service.grpc import calls
from tests.service.ranks.servers import serving_ranks
from tests.service.regions import SYSTEM, region_input, registered
from tests.service.shm import shm_file
from tests.service.waiting import until

NAN, INF = np.float32(np.nan), np.float32(np.inf)
Ids: TypeAlias = NDArray[np.int64]
Weights: TypeAlias = NDArray[np.float32]
Way = Callable[["Server", NDArray[np.float32], Ids, Weights], Awaitable[NDArray[np.float32]]]
WIDE = [2**32 - 1, 2**32, 2**32 + 1, -(2**32), -(2**32) - 1, 2**63 - 1, -(2**63)]
NARROW = [-2, NUM_EXPERTS + 1, 2**31 - 1, -(2**31)]

# Ids of a token, and which of its weights may be anything.
ROUTING = [
    ((0, -1), (1, NAN)), ((-1, 3), (INF, 0.5)), ((4, 1), (NAN, -2)), ((2, 4), (3, -INF)),
    ((-1, -1), (NAN, NAN)), ((4, 4), (INF, NAN)), ((-1, 4), (1, NAN)), ((4, -1), (1, 1)),
    ((3, 0), (0.25, 0.75)), ((1, 2), (-1, 0)),
]  # fmt: skip


class RefusedError(Exception):
    """A request was refused as a client's error."""


class Server:
    """A server, and callers of it."""

    def __init__(self, serving: Serving, peer: Peer, stub: calls.Calls) -> None:
        self.serving, self.peer, self.stub = serving, peer, stub

    async def over_http(self, body: bytes, header_length: int | None = None) -> Any:
        """The output for a request."""
        response = await self.serving.infer(body, header_length)
        if response.status_code != 200:
            raise RefusedError(f"{response.status_code}: {error_of(response, 400)}")
        return output_of(response)

    async def over_grpc(self, message: Any) -> Any:
        """The same."""
        try:
            return calls.output_of(await self.stub.infer(message))
        except grpc.aio.AioRpcError as error:
            raise RefusedError(f"{error.code().name}: {error.details()}") from error


async def _json(server: Server, values: Any, ids: Ids, weights: Weights, datatype: str) -> Any:
    finite = np.nan_to_num(weights)  # JSON has no others
    given = json_input(ids, "topk_ids", datatype), json_input(finite, "topk_weights")
    return await server.over_http(json_request(json_input(values), *given))


def _tensors(values: Any, ids: Ids, weights: Weights, datatype: str) -> dict[str, Any]:
    return {
        "hidden_states": ("FP32", list(values.shape), values.tobytes()),
        "topk_ids": (datatype, list(ids.shape), ids.astype(datatype.lower()).tobytes()),
        "topk_weights": ("FP32", list(weights.shape), weights.tobytes()),
    }


async def _binary(server: Server, values: Any, ids: Ids, weights: Weights, datatype: str) -> Any:
    return await server.over_http(*binary_request(_tensors(values, ids, weights, datatype)))


async def _region(server: Server, values: Any, ids: Ids, weights: Weights) -> Any:
    """Routing in the caller's memory, which stays as it was."""
    with shm_file() as file:
        file.write(data := ids.tobytes() + weights.tobytes())
        await registered(server.serving, "r", file.key, 4096)
        size = list(ids.shape)
        inputs = (
            json_input(values),
            region_input("r", size, 0, "topk_ids", "INT64", ids.nbytes),
            region_input("r", size, ids.nbytes, "topk_weights"),
        )
        try:
            return await server.over_http(json_request(*inputs))
        finally:
            assert file.read(len(data)) == data
            await server.serving.http.post(f"{SYSTEM}/region/r/unregister")


async def _grpc(server: Server, values: Any, ids: Ids, weights: Weights, datatype: str) -> Any:
    message = calls.hidden_message(values)
    for name, (kind, shape, data) in list(_tensors(values, ids, weights, datatype).items())[1:]:
        message.inputs.add(name=name, datatype=kind, shape=shape)
        message.raw_input_contents.append(data)
    return await server.over_grpc(message)


async def _typed_grpc(server: Server, values: Any, ids: Ids, weights: Weights) -> Any:
    message = CLASSES["ModelInferRequest"](model_name="tiny")
    given = ("hidden_states", "fp32", values), ("topk_ids", "int64", ids), ("topk_weights", "fp32", weights)
    for name, kind, array in given:
        tensor = message.inputs.add(name=name, datatype=kind.upper(), shape=array.shape)
        getattr(tensor.contents, f"{kind}_contents").extend(array.ravel().tolist())
    return await server.over_grpc(message)


async def _channel(server: Server, values: Any, ids: Ids, weights: Weights) -> Any:
    try:
        return await asyncio.to_thread(server.peer.infer, values, ids.astype(np.int32), weights)
    except ValueError as error:
        raise RefusedError(*error.args) from error


def _of(way: Any, datatype: str) -> Way:
    return lambda *given: way(*given, datatype)


WAYS: Mapping[str, Way] = {
    "JSON INT32": _of(_json, "INT32"), "JSON INT64": _of(_json, "INT64"),
    "binary INT32": _of(_binary, "INT32"), "binary INT64": _of(_binary, "INT64"),
    "region": _region, "gRPC INT32": _of(_grpc, "INT32"), "gRPC INT64": _of(_grpc, "INT64"),
    "typed gRPC": _typed_grpc, "channel": _channel,
}  # fmt: skip
INT64_WAYS = [name for name in WAYS if "INT32" not in name and name != "channel"]


@asynccontextmanager
async def _server(directory: Path, model: Mapping[str, Any], **changes: Any) -> AsyncIterator[Server]:
    socket = {"socket": str(directory / "channels")}
    changes = {"channels": socket, "shared_memory": {"enabled": True}, **calls.ON, **changes}
    settings = tiny_settings(models=[{**MODEL, **model}], **changes)
    async with (serving if settings.num_ranks == 1 else serving_ranks)(settings) as served:
        server = GrpcServer(served.app, settings)
        await server.start()
        peer = await claimed(served)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield Server(served, peer, calls.Calls(served, server, channel))
        finally:
            peer.close()
            await server.stop()


def _shape(model: Mapping[str, Any]) -> LayerShape:
    return tiny_settings(models=[{**MODEL, **model}]).models[0].shape


def _expected(
    model: Mapping[str, Any], values: NDArray[np.float32], ids: Ids, weights: Weights, device: str
) -> torch.Tensor:
    """float64 [T, H]: the sum of the experts that are named and held here, and of the shared ones.

    device  the server's: random weights depend on it
    """
    shape = _shape(model)
    held, experts = shape.held_experts, random_weights(shape, 0, device)
    gate_up, down = (
        (w.data.double() * w.scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)).cpu()
        for w in (experts.gate_up, experts.down)
    )

    def output(hidden: torch.Tensor, group: int) -> torch.Tensor:
        gate, up = (gate_up[group] @ hidden).chunk(2)
        return down[group] @ (gate / (1 + torch.exp(-gate)) * up)

    out = torch.zeros(values.shape, dtype=torch.float64)
    for token, hidden in enumerate(torch.from_numpy(values).double()):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if expert in held:
                out[token] += weight * output(hidden, held.index(expert))
        for group in range(len(held), shape.num_groups):
            out[token] += output(hidden, group)
    return out


MODELS: Mapping[str, dict[str, Any]] = {
    "whole": {}, "shared": {"num_shared_experts": 1}, "masked": {"masked_max_tokens": 64},
    "masked shared": {"masked_max_tokens": 64, "num_shared_experts": 2}, "part": {"local_experts": "1-2"},
    "part shared": {"local_experts": "2-3", "num_shared_experts": 1},
}  # fmt: skip
RANKS: dict[str, Any] = {"ranks": 2}
HOPPER, GPUS = {"backend": "hopper"}, {"backend": "hopper", "devices": "0-1"}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CASES = [
    *((name, {}) for name in MODELS),
    *(pytest.param(name, RANKS, marks=pytest.mark.slow) for name in ("shared", "part shared")),
    *(pytest.param(name, HOPPER, marks=pytest.mark.gpu) for name in MODELS),
    *(pytest.param(name, GPUS, marks=[pytest.mark.gpu, two_gpus]) for name in ("shared", "part shared")),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
async def test_they_add_nothing_by_any_way_and_are_counted(
    tmp_path: Path, name: str, changes: Mapping[str, Any]
) -> None:
    model, values = MODELS[name], rows(len(ROUTING))
    ids = np.array([of_token for of_token, _ in ROUTING], np.int64)
    weights = np.array([of_token for _, of_token in ROUTING], np.float32)
    device = "cuda" if "backend" in changes else "cpu"
    expected = _expected(model, values, ids, weights, device)
    counted, held = 0, _shape(model).held_experts
    async with _server(tmp_path, model, **changes) as server:
        for way, infer in WAYS.items():
            out = torch.tensor(await infer(server, values, ids, weights))
            bf16 = "masked" not in name and "backend" not in changes  # else FP8 has the activations
            assert diff(out, expected) < (1e-4 if bf16 else 1e-2), way
            assert not out[~expected.any(1)].any(), f"{way}: exactly zero"
            counted += 1
        metric = server.serving.metric
        tokens = counted * len(ROUTING)
        layout = "masked" if "masked" in name else "contiguous"
        await until(lambda: metric("tokens_total", model="tiny", layout=layout) == tokens)
        empty = ((ids < 0) | (ids >= NUM_EXPERTS)).sum()
        assert metric("slots_without_expert_total", model="tiny") == counted * empty
        for expert in range(NUM_EXPERTS):
            wanted = counted * (ids == expert).sum() if expert in held else 0
            assert metric("expert_tokens_total", model="tiny", expert=str(expert)) == wanted


async def test_other_ids_and_repeated_experts_are_refused_by_every_way(tmp_path: Path) -> None:
    """In a sentence with the token, the slot and the id; so are weights of experts that are not finite."""
    values, weights = rows(3), np.full((3, TOP_K), 0.5, np.float32)
    bad = weights.copy()
    bad[2, 1] = NAN
    async with _server(tmp_path, {}) as server:

        async def refused(way: str, ids: list[list[int]], given: Weights = weights) -> str:
            with pytest.raises(RefusedError) as caught:
                await WAYS[way](server, values, np.array(ids, np.int64), given)
            status, text = str(caught.value).split(": ", 1)
            assert status in ("400", "INVALID_ARGUMENT")
            return text

        for way in WAYS:
            for wrong in [*NARROW, *(WIDE if way in INT64_WAYS else ())]:
                text = await refused(way, [[0, 1], [-1, NUM_EXPERTS], [-1, wrong]])
                expected = "topk_ids: expected 0 to 3, or for no expert -1 or 4, got "
                assert text == f"{expected}{wrong} in token 2, slot 1", way
            text = await refused(way, [[0, 1], [-1, -1], [2, 2]])
            assert text == "topk_ids: expected distinct experts, got [2, 2] in token 2", way
            if "JSON" not in way:
                text = await refused(way, [[0, 1], [-1, -1], [-1, 2]], bad)
                assert text == "topk_weights: expected finite numbers, got nan in token 2, slot 1", way
        assert server.serving.metric("slots_without_expert_total", model="tiny") == 0
