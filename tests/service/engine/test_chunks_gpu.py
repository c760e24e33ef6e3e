"""A request in chunks has the bits that it has as a whole, wherever its tensors lie."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from expertd.service.engine.queues import Queues
from expertd.service.engine.steps import Submission
from expertd.service.memory import Span, host_view
from expertd.service.moe.request import OutputMemory
from expertd.service.moe.runner import LayerRunner
from expertd.service.settings.parts import Limits
from tests.kernels.helpers import fresh_generator
from tests.service.moe.gpu_runner import PLACES, SHAPE, runner_with_graphs
from tests.service.moe.requests import layer_request

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runner() -> Iterator[LayerRunner]:
    """With graphs, which small chunks use."""
    with runner_with_graphs() as runner:
        yield runner


@pytest.mark.parametrize("most", [64, 256, 1024])
@pytest.mark.parametrize("ids", [None, torch.int32, torch.int64])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACES, [*PLACES, "none"])))
def test_bits(runner: LayerRunner, source: str, target: str, ids: torch.dtype | None, most: int) -> None:
    generator = fresh_generator()
    tokens = torch.randn(1500, SHAPE.hidden_size, generator=generator).to(torch.bfloat16)
    routing = None
    if ids is not None:
        chosen = torch.rand(1500, SHAPE.num_experts, generator=generator).argsort(1)[:, : SHAPE.top_k]
        routing = chosen.to(ids), torch.rand(1500, SHAPE.top_k, generator=generator)
    into = None if target == "none" else PLACES["pinned" if target == "bytes" else target]
    whole, cut = (layer_request(tokens, "BF16", routing, PLACES[source], "BF16", into) for _ in range(2))
    expected = _bytes(runner.run([whole]).outputs[0])
    queues = Queues(Limits(prefill_chunk_tokens=most), clock=lambda: 0.0)
    queues.set_runners({"layer": runner}, {})
    pending = Submission("layer", cut, lambda _: None)
    queues.add(Submission("layer", layer_request(tokens[:1]), lambda _: None))
    queues.add(pending)
    answers = []
    for _ in range(1 + -(-1500 // most)):
        step = queues.next_step()
        outputs = runner.run([chunk.request for chunk in step]).outputs
        answers += [queues.end(chunk, output) for chunk, output in zip(step, outputs, strict=True)]
    assert answers[1:-1] == [None] * (len(answers) - 2)
    answer = answers[-1]
    assert answer is not None
    assert not isinstance(answer, Exception)
    assert _bytes(answer) == expected


def _bytes(output: OutputMemory) -> bytes:
    if isinstance(output, Span) and output.device is not None:
        assert isinstance(output.owner, torch.Tensor)
        return bytes(output.owner.cpu().numpy())
    return bytes(host_view(output))
