"""Two runners of one layer on two lanes of a GPU: the same bits at the same time, and a graph for decode."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from expertd.kernels import resolve_backend
from expertd.kernels.partitions import SMPartitions
from expertd.service.device import device_of
from expertd.service.engine.local_models import capture_graphs
from expertd.service.engine.runner_sets import LaneRunners
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.weights import random_weights
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.model import Settings
from tests.kernels.helpers import fresh_generator
from tests.service.moe.gpu_runner import DEVICE, SHAPE
from tests.service.moe.requests import layer_request, on_gpu, rows_of

pytestmark = pytest.mark.gpu

MODEL = {
    "name": "m",
    "hidden_size": SHAPE.hidden_size,
    "intermediate_size": SHAPE.intermediate_size,
    "num_experts": SHAPE.num_experts,
    "top_k": SHAPE.top_k,
    "num_shared_experts": SHAPE.num_shared_experts,
}
SPLITS: list[dict[str, int]] = [{}, {"decode": 48, "prefill": 84}]
STEPS = 200


class Lanes:
    """The runners of both lanes, and the layer that they share."""

    def __init__(self, split: dict[str, int]) -> None:
        lanes = {"decode_max_tokens": 64} | {f"{name}_partition": name for name in split}
        settings = Settings.model_validate({"models": [MODEL], "lanes": lanes, "partitions": split})
        weights = random_weights(SHAPE, fresh_generator().initial_seed(), "cuda")
        self.layer = MoELayer(SHAPE, weights, resolve_backend("hopper"))
        self.partitions = SMPartitions(0)
        self.partitions.apply(split)
        sets = [LaneRunners(lane, device_of(DEVICE), self.partitions) for lane in lanes_of(settings)]
        self.decode, self.prefill = (each.add(settings.models[0], self.layer) for each in sets)
        self.capture()

    def capture(self) -> None:
        capture_graphs([self.decode, self.prefill], device_of(DEVICE), lambda: False)

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        out = torch.empty(tokens.shape, dtype=torch.bfloat16, device="cuda")
        result = self.layer(tokens.cuda(), out=out).cpu()
        torch.cuda.synchronize()
        return result


@pytest.fixture(scope="module", params=SPLITS, ids=["all SMs", "split"])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    made = Lanes(request.param)
    yield made
    for runner in (made.decode, made.prefill):
        runner.release_graphs()


def _request(tokens: torch.Tensor) -> LayerRequest:
    return layer_request(tokens, place=on_gpu, output_datatype="BF16", into=on_gpu)


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, SHAPE.hidden_size, generator=fresh_generator()).to(torch.bfloat16)


def _repeat(
    runner: LayerRunner, cases: list[tuple[LayerRequest, torch.Tensor]], start: threading.Barrier
) -> int:
    """Run the requests in turns, on this thread; the number of wrong answers."""
    device_of(DEVICE).prepare_thread()
    start.wait(30)
    wrong = 0
    for number in range(STEPS):
        request, expected = cases[number % len(cases)]
        result = runner.run([request])
        wrong += not torch.equal(rows_of(result.outputs[0], "BF16", SHAPE.hidden_size), expected)
    return wrong


def test_both_lanes_at_once_give_the_bits_of_the_layer(lanes: Lanes) -> None:
    def cases(*sizes: int) -> list[tuple[LayerRequest, torch.Tensor]]:
        made = [_tokens(size) for size in sizes]
        return [(_request(tokens), lanes.expected(tokens)) for tokens in made]

    start = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(_repeat, lanes.decode, cases(1, 7, 64), start),
            pool.submit(_repeat, lanes.prefill, cases(65, 700, 2048), start),
        ]
        assert [each.result(120) for each in running] == [0, 0]


def test_only_decode_has_graphs_of_small_steps(lanes: Lanes) -> None:
    assert lanes.decode._graphs is not None
    assert lanes.prefill._graphs is None
    request = _request(_tokens(5))
    lanes.decode.run([request])
    with lanes.decode.on_stream():
        assert lanes.decode._graphs.again(request) is not None, "the step was a graph, and can be repeated"
        torch.cuda.synchronize()


def test_long_steps_that_recur_become_graphs(lanes: Lanes) -> None:
    tokens = _tokens(1024)
    request, expected = _request(tokens), lanes.expected(tokens)
    for _ in range(10):
        result = lanes.prefill.run([request])
        assert torch.equal(rows_of(result.outputs[0], "BF16", SHAPE.hidden_size), expected)
    assert request.plan


def test_changes_of_the_split_keep_the_bits_and_no_memory() -> None:
    lanes = Lanes(SPLITS[1])
    cases = [(runner, _tokens(size)) for runner, size in ((lanes.decode, 5), (lanes.prefill, 512))]
    used = []
    for number in range(12):
        decode = (16, 48, 80)[number % 3]
        lanes.partitions.apply({"decode": decode, "prefill": 132 - decode})
        lanes.capture()
        assert lanes.prefill.num_sms == 132 - decode
        for runner, tokens in cases:
            result = runner.run([_request(tokens)])
            rows = rows_of(result.outputs[0], "BF16", SHAPE.hidden_size)
            assert torch.equal(rows, lanes.expected(tokens))
        if number % 3 == 2:
            torch.cuda.synchronize()
            used.append(torch.cuda.mem_get_info()[0])
    assert min(used[1:]) >= used[1] - (2 << 20), "what a split needs is made once"


def test_a_stream_is_the_current_one_inside() -> None:
    partitions = SMPartitions(0)
    partitions.apply({"a": 16})
    before = torch.cuda.current_stream()
    outer, inner = torch.cuda.Stream(), partitions.stream("a")  # type: ignore[no-untyped-call]
    with device_of("cuda").steps_on(outer):
        assert torch.cuda.current_stream() == outer
        with device_of("cuda").steps_on(inner):
            assert torch.cuda.current_stream() == inner
        assert torch.cuda.current_stream() == outer
    assert torch.cuda.current_stream() == before


def test_an_error_ends_it() -> None:
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="step"), device_of("cuda").steps_on(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        raise RuntimeError("step")
    assert torch.cuda.current_stream() == before
