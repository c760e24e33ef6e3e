"""Several ranks take FP8 hidden states: each expands its own rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertd.kernels import expand_rows, quantize_rows
from expertd.service.moe.request import FP8, LayerRequest, fp8_rows
from tests.service.apps import binary_request, output_of, rows, serving, tiny_settings
from tests.service.channels.servers import answer_to, claimed
from tests.service.ranks.servers import close, output_for, serving_ranks
from tests.service.ranks.steps import outputs_of, request

pytestmark = pytest.mark.slow  # each server starts processes


def quantized(count: int, seed: int) -> tuple[bytes, bytes, NDArray[np.float32]]:
    """e4m3 values, their scales, and the same numbers in FP32."""
    made = quantize_rows(torch.from_numpy(rows(count, seed)))
    scales = made.scales.contiguous()
    values = made.data.view(torch.uint8).numpy().tobytes()
    return values, scales.numpy().tobytes(), expand_rows(made.data, scales).numpy()


def fp8_request(count: int, seed: int, given: bool = False) -> tuple[LayerRequest, LayerRequest]:
    """A request, and the same numbers in FP32."""
    values, scales, floats = quantized(count, seed)
    wanted = request(floats, "FP32", "FP32", given)
    return replace(wanted, hidden_states=fp8_rows(values, scales, count), datatype=FP8), wanted


async def test_the_answer_is_that_of_the_values(tmp_path: Path) -> None:
    settings = tiny_settings(ranks=3, channels={"socket": str(tmp_path / "channels")})
    async with serving_ranks(settings) as server:
        peer = await claimed(server)
        for count in (1, 2, 5, 16):
            values, scales, floats = quantized(count, count)
            wanted = await output_for(server, floats)
            tensors = {
                "hidden_states": ("UINT8", list(floats.shape), values),
                "hidden_states_scale": ("FP32", [count, 1], scales),
            }
            body, length = binary_request(tensors, parameters={"binary_data_output": True})
            assert np.array_equal(output_of(await server.infer(body, length)), wanted)
            places = peer.places(peer.sequence + 1)
            given = np.frombuffer(fp8_rows(values, scales, count), np.uint8)
            peer.array(places[0], given.shape, np.uint8)[:] = given
            answer = await answer_to(peer, peer.send(count, places, datatype=FP8, output_datatype="FP32"))
            assert answer.status == 200, answer.error
            assert np.array_equal(peer.array(places[3], floats.shape, np.float32), wanted)
        peer.close()


async def test_steps_of_several_datatypes() -> None:
    """Some ranks have rows of one datatype alone, and some have none."""
    (one, same), (other, same_other) = fp8_request(1, 0), fp8_request(3, 1, given=True)
    floats = request(rows(2, 2), "BF16", "FP32")
    steps = [
        ([one], [same]),
        ([one, other], [same, same_other]),
        ([floats, other], [floats, same_other]),
        ([other, floats, one], [same_other, floats, same]),
    ]
    async with serving(tiny_settings()) as single, serving_ranks(tiny_settings(ranks=2)) as server:
        for step, wanted in steps:
            expected, got = await outputs_of(single, wanted), await outputs_of(server, step)
            assert all(map(close, got, expected))
