"""Which tokens a process asks for, and how a layer is run, without vLLM's engine or a server."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.compilation.backends import split_graph
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.models.transformers.moe import TransformersMoERunner, TransformersMoEState

from expertd_vllm import experts
from expertd_vllm.experts import ExpertdMoEMethod, RemoteRunner

TOKENS, HIDDEN, TOP_K, NUM_EXPERTS = 23, 8, 2, 5


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
            part = method(rank, ranks, is_sequence_parallel)._rows(rows, False)
            first = rank * rows if is_sequence_parallel else 0
            asked += range(first + part.start, first + part.stop)
    assert asked == list(range(real))


@pytest.mark.parametrize(("attn_metadata", "rows"), [(None, 0), ({}, TOKENS), ({"mamba": None}, TOKENS)])
def test_a_dummy_batch_asks_for_no_token_and_one_that_says_nothing_for_all(
    attn_metadata: Any, rows: int
) -> None:
    with override_forward_context(ForwardContext({}, attn_metadata, {})):
        assert method(0, 1, False)._rows(TOKENS, False) == slice(0, rows)


def test_a_rank_has_zeros_for_the_tokens_of_others() -> None:
    x, ids, weights = torch.randn(TOKENS, HIDDEN), torch.zeros(TOKENS, TOP_K), torch.ones(TOKENS, TOP_K)
    total = torch.zeros(TOKENS, HIDDEN)
    with override_forward_context(context("attention", 20, TOKENS)):
        for rank in range(3):
            part, out = method(rank, 3, False), torch.full((TOKENS, HIDDEN), torch.nan)
            part.call(x, ids, weights, out)
            total += out
    expected = expected_of(x, ids, weights)
    expected[20:] = 0
    torch.testing.assert_close(total, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["plain", "shared", "latent", "transformers"])
def test_a_layer_is_routed_in_one_graph_and_written_to_a_buffer_of_it(kind: str) -> None:
    """Otherwise the next CUDA graph reads the output at the address that it had at capture."""
    pieces: list[Any] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        whole, items = split_graph(module, [experts._SPLITTING])
        pieces.extend([whole.graph, *(item.graph.graph for item in items)])
        return whole

    x, logits = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, NUM_EXPERTS)
    weights, ids = (found[:, :TOP_K] for found in logits.sort(descending=True))
    given = (x, ids, weights) if kind == "transformers" else (x, logits)
    layer = runner(kind)
    with override_forward_context(context("attention", TOKENS, TOKENS, layer)):
        eager = layer(*given)
        compiled: Any = torch.compile(lambda *inputs: 2 * layer(*inputs), backend=backend, fullgraph=True)
        got = compiled(*given)
    rows = x[:, : HIDDEN // 2] if kind == "latent" else x
    expected = expected_of(rows, ids, weights)
    if kind == "latent":
        expected = torch.cat([expected, expected], 1)
    if kind in ("shared", "latent"):
        expected = expected + 3 * x
    torch.testing.assert_close(eager, expected, rtol=0, atol=0)
    torch.testing.assert_close(got, 2 * expected, rtol=0, atol=0)

    whole, first, call, _ = pieces
    routes = [node for node in first.nodes if node.target == torch.ops.expertd.route]
    assert len(routes) == (kind != "transformers")
    (node,) = (node for node in call.nodes if node.op == "call_function")
    assert node.target == torch.ops.expertd.experts
    place = [each.name for each in call.nodes].index(node.args[3].name)
    given_to_call = next(node for node in whole.nodes if node.target == "submod_1").args[place]
    piece, number = given_to_call.args
    assert piece.target == "submod_0"
    assert first.output_node().args[0][number].target == torch.empty_like


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_compilers_know_what_routing_gives(kind: str) -> None:
    """Shapes, strides and types; routers may give parts of larger tensors."""
    layer, x = runner(kind), torch.randn(TOKENS, HIDDEN)
    inputs = x, torch.randn(TOKENS, NUM_EXPERTS), x if kind == "shared" else None, None, TOP_K
    with override_forward_context(context("attention", TOKENS, TOKENS, layer)):
        route: Any = torch.ops.expertd.route.default
        torch.library.opcheck(route, (*inputs, layer._encode_layer_name()), test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("is_compiled", "is_captured", "makes_device_call", "first"),
    [
        (False, False, False, "call"),
        (True, False, False, "shared"),  # the compiler may use the memory of the call's inputs again
        (True, True, True, "call"),
    ],
)
def test_the_server_begins_before_shared_experts_where_it_can(
    is_compiled: bool, is_captured: bool, makes_device_call: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_is_captured", lambda _: is_captured)
    done: list[str] = []
    layer, x = runner("shared", done), torch.randn(TOKENS, HIDDEN)
    layer._quant_method._is_compiled = is_compiled
    layer._quant_method.remote.makes_device_call = lambda _: makes_device_call
    with override_forward_context(context("attention", TOKENS, TOKENS, layer)):
        layer(x, torch.randn(TOKENS, NUM_EXPERTS))
    assert done == [first, "call" if first == "shared" else "shared"]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_no_call_is_made_while_routing_is_only_captured(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids in its buffers are of no use then. Replays do not run the Python that knows."""
    done: list[str] = []
    layer, x = runner("plain", done), torch.randn(TOKENS, HIDDEN)
    layer._quant_method._is_compiled = is_compiled
    logits, out = torch.randn(TOKENS, NUM_EXPERTS), torch.full((TOKENS, HIDDEN), torch.nan)
    with override_forward_context(context("attention", TOKENS, TOKENS, layer)):
        with monkeypatch.context() as capture:
            capture.setattr(experts, "_is_captured", lambda _: True)
            ids, weights = torch.ops.expertd.route(x, logits, None, None, TOP_K, layer._encode_layer_name())
        torch.ops.expertd.experts(x, torch.zeros_like(ids), weights, out, layer.layer_name)
        assert not done
        assert not out.any()
        torch.ops.expertd.experts(x, ids, weights, out, layer.layer_name)
    assert done == ["call"]
    torch.testing.assert_close(out, expected_of(x, ids, weights), rtol=0, atol=0)


def context(known_by: str, real: int, rows: int, layer: Any = None) -> ForwardContext:
    """Of a step with `real` tokens and padding behind them, up to `rows`."""
    padding, attention = torch.arange(rows) >= real, {"mamba": SimpleNamespace()}
    if known_by == "attention":  # and asking a tensor of this device raises, as no answer may be waited for
        padding = padding.to("meta")
        attention["attn"] = SimpleNamespace(num_actual_tokens=real)
    elif known_by == "data parallel ranks":  # whose dummy batches have attention, too
        attention["attn"] = SimpleNamespace(num_actual_tokens=rows)
    ranks: Any = "some" if known_by == "data parallel ranks" else None
    return ForwardContext({"layer": layer}, attention, {}, dp_metadata=ranks, is_padding=padding)


def runner(kind: str, done: list[str] | None = None) -> Any:
    """vLLM's own, of a layer whose call computes in this process; `done`: its parts, as they begin."""

    def select_experts(router_logits: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        weights, ids = (found[:, :TOP_K] for found in router_logits.sort(descending=True))
        return weights, ids

    class Shared(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if done is not None:
                done.append("shared")
            return 3 * x

    used = method(0, 1, False, done)
    used.moe_kernel = None
    experts_of: Any = torch.nn.Module()
    experts_of.quant_method, experts_of._ensure_moe_quant_config_init = used, lambda: None
    experts_of.forward_modular = lambda **given: used.apply(experts_of, **given)
    parallel = SimpleNamespace(enable_eplb=False, use_fi_nvl_two_sided_kernels=False)
    moe = SimpleNamespace(
        moe_parallel_config=parallel, experts_per_token=TOP_K, is_sequence_parallel=False,
        hidden_dim=HIDDEN // 2 if kind == "latent" else HIDDEN, hidden_dim_unpadded=HIDDEN,
        skip_final_all_reduce=False, dp_size=1, tp_size=1, ep_size=1, pcp_size=1,
    )  # fmt: skip
    base: Any = TransformersMoERunner if kind == "transformers" else MoERunner
    more: dict[str, Any] = {"moe_state": TransformersMoEState()} if kind == "transformers" else {}
    if kind in ("shared", "latent"):
        more["shared_experts"] = Shared()
    if kind == "latent":
        more["routed_input_transform"] = lambda x: x[:, : HIDDEN // 2].contiguous()
        more["routed_output_transform"] = lambda x: torch.cat([x, x], 1)
    with set_current_vllm_config(VllmConfig()):
        router: Any = SimpleNamespace(select_experts=select_experts)
        return type("RemoteOne", (RemoteRunner, base), {})("layer", moe, router, experts_of, **more)


def method(rank: int, ranks: int, is_sequence_parallel: bool, done: list[str] | None = None) -> Any:
    """One of a tensor parallel rank, which computes in this process."""

    def submit(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *_: int) -> Any:
        if done is not None:
            done.append("call")
        return SimpleNamespace(wait=lambda out: out.copy_(expected_of(x, topk_ids, topk_weights)))

    made: Any = ExpertdMoEMethod.__new__(ExpertdMoEMethod)
    parallel = SimpleNamespace(is_sequence_parallel=is_sequence_parallel)
    made.moe = SimpleNamespace(moe_parallel_config=parallel)
    made._rank, made._ranks, made._microbatches, made._calls = rank, ranks, 1, {}
    made._is_compiled = False
    made.remote = SimpleNamespace(submit=submit, name="layer", makes_device_call=lambda _: False)
    made._seconds = SimpleNamespace(time=lambda: torch.no_grad())
    return made
