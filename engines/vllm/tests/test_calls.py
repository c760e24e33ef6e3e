"""Which tokens a process asks for, and in what requests, without vLLM's engine or a server."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.forward_context import ForwardContext, override_forward_context

from expertd_vllm.experts import ExpertdMoEMethod
from expertd_vllm.remote import ChannelCall, RemoteLayer

TOKENS, HIDDEN, TOP_K = 23, 8, 2


class FakeChannel:
    """Answers with ids and weights in the first columns of 1 + x, when waited for."""

    def __init__(self, max_tokens: int, num_slots: int) -> None:
        self.max_tokens = max_tokens
        self.slots = [
            SimpleNamespace(
                hidden_states=torch.zeros(max_tokens, HIDDEN),
                topk_ids=torch.zeros(max_tokens, TOP_K, dtype=torch.int32),
                topk_weights=torch.zeros(max_tokens, TOP_K),
                is_free=True,
            )
            for _ in range(num_slots)
        ]
        for slot in self.slots:
            slot.first = partial(_first, slot)
        self.sizes: list[int] = []

    def submit(self, slot: Any, num_tokens: int, *, routed: bool, model: str) -> Any:
        assert (slot.is_free, routed, model) == (True, True, "layer")
        slot.is_free = False
        self.sizes.append(num_tokens)
        return SimpleNamespace(slot=slot, num_tokens=num_tokens)

    def wait(self, ticket: Any) -> Tensor:
        slot, n = ticket.slot, ticket.num_tokens
        slot.is_free = True
        return expected_of(slot.hidden_states[:n], slot.topk_ids[:n], slot.topk_weights[:n])


def _first(slot: Any, n: int) -> tuple[Tensor, ...]:
    return slot.hidden_states[:n], slot.topk_ids[:n], slot.topk_weights[:n], slot.hidden_states[:n]


def expected_of(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    out = x + 1
    out[:, :TOP_K] = topk_ids.to(out.dtype) + topk_weights
    return out


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 7, 8, TOKENS - 1, TOKENS, 100])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_a_batch_is_cut_into_requests(max_tokens: int, num_slots: int, ids: torch.dtype) -> None:
    channel = FakeChannel(max_tokens, num_slots)
    inputs = (
        torch.randn(TOKENS, HIDDEN),
        torch.randint(-1, 9, (TOKENS, TOP_K), dtype=ids),
        torch.rand(TOKENS, TOP_K),
    )
    out = torch.full((TOKENS, HIDDEN), torch.nan)
    ChannelCall("layer", channel, channel.slots, inputs).wait(out)
    torch.testing.assert_close(out, expected_of(*inputs), rtol=0, atol=0)
    assert sum(channel.sizes) == TOKENS
    assert len(channel.sizes) == -(-TOKENS // max_tokens)


class FakeDeviceChannel:
    """Answers as FakeChannel, in slots of calls."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.sent: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def send(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, model: str, slot: int) -> None:
        assert (model, slot not in self.sent, topk_ids.dtype) == ("layer", True, torch.int32)
        assert topk_weights.dtype == torch.float32
        self.sent[slot] = x, topk_ids, topk_weights

    def wait(self, out: Tensor, *, slot: int) -> None:
        out.copy_(expected_of(*self.sent.pop(slot)))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("max_tokens", [TOKENS - 1, TOKENS])
def test_batches_that_a_gpu_can_send_by_itself(max_tokens: int, ids: torch.dtype) -> None:
    """In a slot of each microbatch; larger ones go over the channel."""
    calls, channel = FakeDeviceChannel(max_tokens), FakeChannel(8, 4)
    server: Any = SimpleNamespace(device_channel=calls, channel=lambda x, num_slots: channel)
    layer = RemoteLayer(server, "layer", 3, None)
    inputs = (
        torch.randn(TOKENS, HIDDEN),
        torch.randint(-1, 9, (TOKENS, TOP_K), dtype=ids),
        torch.rand(TOKENS, TOP_K).double(),
    )
    made = [layer.submit(*inputs, part, 2) for part in range(2)]
    assert sorted(calls.sent) == ([0, 1] if max_tokens == TOKENS else [])
    for call in made:
        out = torch.full((TOKENS, HIDDEN), torch.nan)
        call.wait(out)
        torch.testing.assert_close(out, expected_of(inputs[0], inputs[1], inputs[2].float()), rtol=0, atol=0)


def test_two_microbatches_are_under_way_in_slots_of_their_own() -> None:
    channel = FakeChannel(8, 4)
    server: Any = SimpleNamespace(device_channel=None, channel=lambda x, num_slots: channel)
    layer = RemoteLayer(server, "layer", 3, None)
    batches = [
        (torch.randn(TOKENS, HIDDEN), torch.ones(TOKENS, TOP_K) * part, torch.rand(TOKENS, TOP_K))
        for part in (0, 1)
    ]
    calls = [layer.submit(*batch, part, 2) for part, batch in enumerate(batches)]
    for batch, call in zip(batches, calls, strict=True):
        out = torch.empty(TOKENS, HIDDEN)
        call.wait(out)
        torch.testing.assert_close(out, expected_of(*batch), rtol=0, atol=0)


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
