"""FP8 hidden states in requests: UINT8 or FP8 values with FP32 scales."""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from expertd.kernels import expand_rows, quantize_rows
from expertd.service.channels.geometry import Geometry
from expertd.service.channels.requests import ChannelModel, ChannelRequestError, RequestReader
from expertd.service.checkpoints import models_of
from expertd.service.engine.loading import load
from expertd.service.engine.spec import specs_of
from expertd.service.http.protocol import OipError, parse_request
from expertd.service.http.routes.open_inference import fp8_parameters, input_datatypes
from expertd.service.memory import Span
from expertd.service.moe.request import FP8, LayerRequest, StepResult, fp8_rows
from expertd.service.settings.served import CheckpointSettings
from expertd_client.channel.layout import REQUEST
from tests.service.apps import (
    HIDDEN,
    binary_request,
    error_of,
    hidden_request,
    json_input,
    json_request,
    output_of,
    rows,
    serving,
    tiny_settings,
)
from tests.service.channels.servers import answer_to, channel_server, claimed
from tests.service.checkpoints.encoders import bf16
from tests.service.checkpoints.layouts import write
from tests.service.regions import (
    AddressRunner,
    Device,
    bytes_of,
    enabled,
    region,
    region_input,
    register_cuda,
)

Array = npt.NDArray[Any]
NOTHING: Array = rows(0)
TENSORS = ("hidden_states", "hidden_states_scale")
BINARY = {"parameters": {"binary_data_output": True}}


def quantized(count: int) -> tuple[Array, Array, Array]:
    """e4m3 values as bytes, scales, and the same numbers in FP32."""
    made = quantize_rows(torch.from_numpy(rows(count)))
    scales = made.scales.contiguous()
    return made.data.view(torch.uint8).numpy(), scales.numpy(), expand_rows(made.data, scales).numpy()


def fp8_request(values: Array, scales: Array, datatype: str = "UINT8") -> tuple[bytes, int]:
    tensors = {
        "hidden_states": (datatype, list(values.shape), values.tobytes()),
        "hidden_states_scale": ("FP32", list(scales.shape), scales.tobytes()),
    }
    return binary_request(tensors, **BINARY)


@pytest.mark.parametrize("datatype", ["UINT8", "FP8"])
@pytest.mark.parametrize("count", [1, 5, 64, 0])
async def test_the_answer_is_that_of_the_values(datatype: str, count: int) -> None:
    values, scales, expected = (
        quantized(count) if count else (NOTHING.astype(np.uint8), NOTHING[:, :1], NOTHING)
    )
    async with serving(tiny_settings()) as server:
        wanted = output_of(await server.infer(*hidden_request(expected)))
        for _ in range(3):  # the plan of the first one is used again
            response = await server.infer(*fp8_request(values, scales, datatype))
            assert np.array_equal(output_of(response), wanted), "its datatype is the model's"
        other = values.copy()
        other[:1, :1] ^= 0x80
        changed = output_of(await server.infer(*fp8_request(other, scales, datatype)))
        assert count == 0 or not np.array_equal(changed, wanted)


async def test_scales_may_be_json_and_come_first() -> None:
    values, scales, expected = quantized(3)
    async with serving(tiny_settings()) as server:
        wanted = output_of(await server.infer(*hidden_request(expected)))
        inputs = [
            json_input(scales, "hidden_states_scale"),
            {
                "name": "hidden_states",
                "datatype": "UINT8",
                "shape": [3, HIDDEN],
                "parameters": {"binary_data_size": values.nbytes},
            },
        ]
        header = json_request(*inputs, **BINARY)
        response = await server.infer(header + values.tobytes(), len(header))
        assert np.array_equal(output_of(response), wanted)


class ExpandingRunner(AddressRunner):
    """Doubles the numbers of FP8 values and scales that lie apart."""

    def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
        return super()._run([_expanded(request) for request in requests])


def _expanded(request: LayerRequest) -> LayerRequest:
    assert request.datatype == FP8
    assert request.scales is not None
    values, scales = (
        torch.frombuffer(bytearray(bytes_of(each)), dtype=torch.uint8).view(request.num_tokens, -1)
        for each in (request.hidden_states, request.scales)
    )
    floats = expand_rows(values.view(torch.float8_e4m3fn), scales.view(torch.float32))
    return replace(request, hidden_states=floats.numpy().tobytes(), datatype="FP32", scales=None)


def request_with_region(
    region: str,
    inside: Sequence[str],
    write: Callable[[Array, int], object],
    values: Array,
    scales: Array,
) -> tuple[bytes, int]:
    """A request whose tensors `inside` are written to a region; the other ones are in the body."""
    inputs, body = [], b""
    where = zip(TENSORS, (values, scales), ("UINT8", "FP32"), (512, 4100), strict=True)
    for name, array, datatype, offset in where:
        shape = list(array.shape)
        if name in inside:
            write(array, offset)
            inputs.append(region_input(region, shape, offset, name, datatype, array.nbytes))
        else:
            size = {"binary_data_size": array.nbytes}
            inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": size})
            body += array.tobytes()
    header = json_request(*inputs, **BINARY)
    return header + body, len(header)


@pytest.mark.parametrize("on_gpu", [("hidden_states",), ("hidden_states_scale",), tuple(TENSORS)])
async def test_values_and_scales_in_memory_of_a_gpu(on_gpu: tuple[str, ...]) -> None:
    """The device gets them as they lie; the rest of them comes in the body."""
    values, scales, expected = quantized(4)
    device = Device(ExpandingRunner())
    async with serving(enabled(), device.loader()) as server:
        await register_cuda(server, "gpu", 8192)

        def write(array: Array, offset: int) -> None:
            ctypes.memmove(device.address + offset, array.tobytes(), array.nbytes)

        given = request_with_region("gpu", on_gpu, write, values, scales)
        for _ in range(2):
            answer = await server.infer(*given)
            np.testing.assert_array_equal(output_of(answer), 2 * expected)
        assert all(region.uses == 0 for region in server.app.engine.shared_memory.status("cuda"))


@pytest.mark.parametrize("in_file", [("hidden_states",), tuple(TENSORS)])
@pytest.mark.parametrize("on_device", [False, True])
async def test_values_in_a_file(in_file: tuple[str, ...], on_device: bool) -> None:
    """A GPU reads them there; the host reads only the scales, whether they are there or in the body."""
    values, scales, expected = quantized(4)
    loader = Device(ExpandingRunner()).loader() if on_device else load
    async with serving(enabled(), loader) as server:
        wanted = 2 * expected if on_device else output_of(await server.infer(*hidden_request(expected)))
        async with region(server, 8192, "file") as file:
            given = request_with_region("file", in_file, file.write, values, scales)
            for _ in range(2):
                answer = await server.infer(*given)
                np.testing.assert_array_equal(output_of(answer), wanted)


ALONE = "input hidden_states_scale: expected it with FP8 or UINT8 hidden_states alone, got "
WRONG: list[tuple[str, int, tuple[str, list[int]] | None, str]] = [
    ("UINT8", 1, None, f"{ALONE}UINT8 without"),
    ("FP32", 1, ("FP32", [1, 1]), f"{ALONE}FP32 with it"),
    ("UINT8", 1, ("FP32", [1, 2]), "shape of input hidden_states_scale: expected [1, 1], got [1, 2]"),
    ("UINT8", 2, ("FP32", [1, 1]), "shape of input hidden_states_scale: expected [2, 1], got [1, 1]"),
    ("UINT8", 1, ("BF16", [1, 1]), "datatype of input hidden_states_scale: expected FP32, got 'BF16'"),
]


async def test_wrong_requests_are_refused() -> None:
    sizes = {"UINT8": 1, "BF16": 2, "FP32": 4}
    values, scales, _ = quantized(1)
    async with serving(tiny_settings()) as server:
        for datatype, count, given, text in WRONG:
            shape = [count, HIDDEN]
            tensors = {"hidden_states": (datatype, shape, bytes(count * HIDDEN * sizes[datatype]))}
            if given is not None:
                tensors["hidden_states_scale"] = (*given, bytes(math.prod(given[1]) * sizes[given[0]]))
            assert error_of(await server.infer(*binary_request(tensors)), 400).startswith(text)
        body = json_request(json_input(values, datatype="UINT8"), json_input(scales, "hidden_states_scale"))
        text = "input hidden_states: expected the parameter binary_data_size with UINT8, got data"
        assert error_of(await server.infer(body), 400) == text
        body, length = binary_request(
            {"hidden_states": ("FP32", [1, HIDDEN], rows(1).tobytes())},
            outputs=[{"name": "hidden_states", "parameters": {"datatype": "FP8"}}],
        )
        text = "datatype of output hidden_states: expected BF16, FP16 or FP32, got 'FP8'"
        assert error_of(await server.infer(body, length), 400) == text


def test_a_hidden_size_without_whole_blocks_takes_no_fp8(tmp_path: Path) -> None:
    write(tmp_path / "gpt-oss", bf16, "in turns", (144, 128), quantization=None)
    settings = tiny_settings().with_models(
        models_of(CheckpointSettings(path=tmp_path / "gpt-oss", layers="0"))
    )
    spec = specs_of(settings)["gpt-oss.layers.0"]
    tensors = {
        "hidden_states": ("UINT8", [1, 144], bytes(144)),
        "hidden_states_scale": ("FP32", [1, 1], rows(1)[:, :1].tobytes()),
    }
    text = r"expected BF16, FP16 or FP32 with a hidden_size \(144\) that is no multiple of 128, got UINT8"
    with pytest.raises(OipError, match=text):
        parse_request(*binary_request(tensors), spec)
    assert fp8_parameters(spec) == {}
    assert input_datatypes(spec, "hidden_states") == "BF16,FP16,FP32"
    model = ChannelModel("gpt-oss", 144, 2, lambda _: None, True, spec.takes_fp8)
    geometry = Geometry.for_slots(1, 16, 144, 2, 4)
    reader = RequestReader(geometry, Span(0, 1 << 16, None, memoryview(bytearray(1 << 16)), None), [model])
    with pytest.raises(ChannelRequestError, match=r"datatype: expected 1, 2 or 3 .*, got 4"):
        reader.line(REQUEST.pack(1, 4, 3, 0, 0, 0, 0, 0, 4096, 0, 0))


async def test_a_channel_takes_rows_with_their_scales(tmp_path: Path) -> None:
    values, scales, expected = quantized(3)
    async with channel_server(tmp_path) as server:
        wanted = output_of(await server.infer(*hidden_request(expected)))
        peer = await claimed(server)
        given = np.frombuffer(fp8_rows(values.data, scales.data, 3), np.uint8)
        for _ in range(2):
            places = peer.places(peer.sequence + 1)
            peer.array(places[0], given.shape, np.uint8)[:] = given
            answer = await answer_to(peer, peer.send(3, places, datatype="FP8", output_datatype="FP32"))
            assert answer.status == 200, answer.error
            assert np.array_equal(peer.array(places[3], (3, HIDDEN), np.float32), wanted)
        refused = await answer_to(peer, peer.send(1, peer.places(3), output_datatype="FP8"))
        assert (refused.status, refused.error) == (400, "output_datatype: expected 1, 2 or 3, got 4")
        peer.close()
