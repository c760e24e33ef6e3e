"""Which rows and weights a rank sends, and what it gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd_client.engine import PluginSettings, RemoteServer
from expertd_sglang.experts import ExpertdFusedMoEMethod
from tests import stubs

TOKENS, HIDDEN, NUM_EXPERTS, TOP_K = 23, 16, 8, 3
SCALES = torch.rand(NUM_EXPERTS, dtype=torch.float64) + 1  # an expert multiplies by its number's


class Remote:
    """A layer whose experts multiply; `sent`: the numbers of tokens that were sent."""

    def __init__(self, device_channel: Any = None) -> None:
        self.sent: list[int] = []
        self.server = SimpleNamespace(device_channel=device_channel)

    def submit(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, part: int, parts: int) -> Any:
        assert (part, parts) == (0, 1)
        self.sent.append(len(x))
        sums = expected_of(x, topk_ids, topk_weights)
        return SimpleNamespace(wait=lambda out: out.copy_(sums))


def expected_of(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    scales = torch.where(topk_ids < 0, 0, SCALES[topk_ids.clamp_min(0)])
    return x.double() * (scales * topk_weights.double()).sum(1, keepdim=True)


def batch(num_tokens: int) -> tuple[Tensor, stubs.StandardTopKOutput]:
    """With padding at the end, as SGLang marks it."""
    ids = torch.rand(num_tokens, NUM_EXPERTS).argsort(1)[:, :TOP_K].int()
    ids[num_tokens - num_tokens // 4 :] = -1
    logits = torch.randn(num_tokens, NUM_EXPERTS)
    return torch.randn(num_tokens, HIDDEN), stubs.StandardTopKOutput(
        torch.rand(num_tokens, TOP_K), ids, logits
    )


def run(
    x: Tensor, topk: Any, remote: Any, *, rank: int = 0, ranks: int = 1, factor: float | None = None
) -> Tensor:
    method: Any = ExpertdFusedMoEMethod(remote)
    layer = SimpleNamespace(moe_tp_rank=rank, moe_tp_size=ranks)
    method.create_moe_runner(layer, SimpleNamespace(routed_scaling_factor=factor))
    combined = method.apply(layer, stubs.StandardDispatchOutput(x, None, topk))
    assert isinstance(combined, stubs.StandardCombineInput)
    return combined.hidden_states


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, TOKENS])
def test_ranks_outputs_add_up_and_no_token_is_sent_twice(ranks: int, num_tokens: int) -> None:
    (x, topk), remote = batch(num_tokens), Remote()
    total = torch.zeros(num_tokens, HIDDEN)
    for rank in range(ranks):
        total += run(x, topk, remote, rank=rank, ranks=ranks)
    torch.testing.assert_close(total, expected_of(x, topk.topk_ids, topk.topk_weights).float())
    assert sum(remote.sent) == num_tokens
    assert 0 not in remote.sent


@pytest.mark.parametrize(
    ("is_cuda", "factor", "expected"), [(True, 2.5, 2.5), (True, None, 1), (False, 2.5, 1)]
)
def test_the_layers_factor_is_applied_where_no_model_does(
    is_cuda: bool, factor: float | None, expected: float
) -> None:
    stubs.state.is_cuda = is_cuda
    x, topk = batch(TOKENS)
    before = topk.topk_weights.clone()
    out = run(x, topk, Remote(), factor=factor)
    torch.testing.assert_close(out, (expected * expected_of(x, topk.topk_ids, topk.topk_weights)).float())
    assert torch.equal(topk.topk_weights, before)


def test_a_router_that_has_not_run_yet() -> None:
    x, topk = batch(TOKENS)
    bypassed = stubs.BypassedTopKOutput(x, topk.router_logits, SimpleNamespace(top_k=TOP_K))
    weights, ids, _ = bypassed.to_standard()
    torch.testing.assert_close(run(x, bypassed, Remote()), expected_of(x, ids, weights).float())
    with pytest.raises(ValueError, match="topk_output: expected ids and weights, got SimpleNamespace"):
        run(x, SimpleNamespace(), Remote())


@pytest.mark.parametrize(
    ("channel", "refused"),
    [
        (None, "tokens of a CUDA graph: expected at most 0 .*, got 23"),
        (SimpleNamespace(max_tokens=TOKENS - 1), "expected at most 22 .--cuda-graph-bs-decode.*, got 23"),
        (SimpleNamespace(max_tokens=TOKENS), None),
    ],
)
def test_a_graph_has_only_calls_that_the_gpu_makes(
    channel: Any, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, topk), remote = batch(TOKENS), Remote(channel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if refused is None:
        run(x, topk, remote)
    else:
        with pytest.raises(ValueError, match=refused):
            run(x, topk, remote)
    assert remote.sent == ([TOKENS] if refused is None else [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_device_calls_need_a_gpu() -> None:
    remote: Any = SimpleNamespace(
        server=RemoteServer(PluginSettings("http://127.0.0.1:9", transport="device"))
    )
    with pytest.raises(
        ValueError, match="transport: expected auto, channel, nixl or http without a GPU, got device"
    ):
        ExpertdFusedMoEMethod(remote).process_weights_after_loading(None)
