"""Which tokens a process asks for, without vLLM's engine or a server."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.forward_context import ForwardContext, override_forward_context

from expertd_vllm.experts import ExpertdMoEMethod, RemoteRunner

TOKENS, HIDDEN, TOP_K = 23, 8, 2


def expected_of(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    out = x + 1
    out[:, :TOP_K] = topk_ids.to(out.dtype) + topk_weights
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
@pytest.mark.parametrize("known_by", ["attention", "padding", "data parallel ranks"])
@pytest.mark.parametrize("real", [0, 1, 2, 20, TOKENS])
def test_each_real_token_is_asked_for_by_one_rank(
    ranks: int, is_sequence_parallel: bool, known_by: str, real: int
) -> None:
    rows = -(-TOKENS // ranks) if is_sequence_parallel else TOKENS
    asked: list[int] = []
    with override_forward_context(context(known_by, real, rows * ranks if is_sequence_parallel else rows)):
        for rank in range(ranks):
            part = method(rank, ranks, is_sequence_parallel)._rows(rows)
            first = rank * rows if is_sequence_parallel else 0
            asked += range(first + part.start, first + part.stop)
    assert asked == list(range(real))


@pytest.mark.parametrize(("attn_metadata", "rows"), [(None, 0), ({}, TOKENS), ({"mamba": None}, TOKENS)])
def test_a_dummy_batch_asks_for_no_token_and_one_that_says_nothing_for_all(
    attn_metadata: Any, rows: int
) -> None:
    with override_forward_context(ForwardContext({}, attn_metadata, {})):
        assert method(0, 1, False)._rows(TOKENS) == slice(0, rows)


def test_a_rank_has_zeros_for_the_tokens_of_others() -> None:
    x, ids, weights = torch.randn(TOKENS, HIDDEN), torch.zeros(TOKENS, TOP_K), torch.ones(TOKENS, TOP_K)
    total = torch.zeros(TOKENS, HIDDEN)
    with override_forward_context(context("attention", 20, TOKENS)):
        for rank in range(3):
            part, out = method(rank, 3, False), torch.full((TOKENS, HIDDEN), torch.nan)
            part.submit(x, ids, weights)
            part.wait(out)
            total += out
    expected = expected_of(x, ids, weights)
    expected[20:] = 0
    torch.testing.assert_close(total, expected, rtol=0, atol=0)


@pytest.mark.parametrize("width", [None, HIDDEN, 2 * HIDDEN])
@pytest.mark.parametrize("is_split", [True, False])
def test_a_compiled_layer_writes_to_a_buffer_of_the_previous_graph(width: int | None, is_split: bool) -> None:
    """Otherwise the next CUDA graph reads the output at the address that it had at capture."""
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return module

    split = method(0, 1, False)
    split.is_split = is_split

    class Runner(torch.nn.Module):
        _quant_method, layer_name = split, "layer"

        def forward(
            self, hidden_states: Tensor, logits: Tensor, shared_experts_input: Tensor | None = None
        ) -> Tensor:
            shared = hidden_states if shared_experts_input is None else shared_experts_input
            return shared + hidden_states[:, :1] * logits

    runner: Any = type("Remote", (RemoteRunner, Runner), {"kind": Runner})()
    x, logits, shared = (torch.randn(TOKENS, n) for n in (HIDDEN, 1, width or HIDDEN))
    more = {"shared_experts_input": shared} if width else {}
    with override_forward_context(ForwardContext({"layer": runner}, {}, {})):
        compiled: Any = torch.compile(runner, backend=backend)
        got = compiled(x, logits, **more)
    torch.testing.assert_close(got, (shared if width else x) + x[:, :1] * logits, rtol=0, atol=0)
    layers = [node for node in graphs[0].nodes if node.target == torch.ops.expertd.experts]
    assert len(layers) == is_split
    if is_split:
        (_, made, _), ((output,),) = layers[0].args, graphs[0].output_node().args
        assert made is output
        assert made.target == torch.empty_like


def context(known_by: str, real: int, rows: int) -> ForwardContext:
    """Of a step with `real` tokens and padding behind them, up to `rows`."""
    padding, attention = torch.arange(rows) >= real, {"mamba": SimpleNamespace()}
    if known_by == "attention":  # and asking a tensor of this device raises, as no answer may be waited for
        padding = padding.to("meta")
        attention["attn"] = SimpleNamespace(num_actual_tokens=real)
    elif known_by == "data parallel ranks":  # whose dummy batches have attention, too
        attention["attn"] = SimpleNamespace(num_actual_tokens=rows)
    ranks: Any = "some" if known_by == "data parallel ranks" else None
    return ForwardContext({}, attention, {}, dp_metadata=ranks, is_padding=padding)


def method(rank: int, ranks: int, is_sequence_parallel: bool) -> Any:
    """One of a tensor parallel rank, which computes in this process."""

    def submit(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *_: int) -> Any:
        return SimpleNamespace(wait=lambda out: out.copy_(expected_of(x, topk_ids, topk_weights)))

    made: Any = ExpertdMoEMethod.__new__(ExpertdMoEMethod)
    parallel = SimpleNamespace(is_sequence_parallel=is_sequence_parallel)
    made.moe = SimpleNamespace(moe_parallel_config=parallel)
    made._rank, made._ranks, made._microbatches, made._calls = rank, ranks, 1, {}
    made.remote = SimpleNamespace(submit=submit, name="layer")
    made._seconds = SimpleNamespace(time=lambda: torch.no_grad())
    return made
