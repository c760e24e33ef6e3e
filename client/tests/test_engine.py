"""What plugins of engines share: settings, checks, what is read of files, and how a batch is sent."""

import queue
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from expertd_client import ModelMetadata, ServerUnreachableError, engine, weights_id
from expertd_client.engine import (
    EXPERTS,
    ChannelCall,
    PluginSettings,
    RemoteLayer,
    RemoteServer,
    check_weights,
    make_settings,
    tensors_of_others,
)

TOKENS, HIDDEN, TOP_K = 23, 8, 2
ANY: Any = None  # metadata that is not looked at
METADATA: dict[str, Any] = {"hidden_size": 128, "num_experts": 8, "top_k": 2, "shared_experts": "none"}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/models/small/", "small"),
        ("/cache/models--Qwen--Qwen3-30B-A3B/snapshots/ad44e777", "Qwen3-30B-A3B"),
        ("/cache/snapshots/ad44e777", "ad44e777"),
    ],
)
def test_layers_are_named_as_the_server_names_them(model: str, name: str) -> None:
    assert make_settings({"url": "http://a"}, model) == PluginSettings("http://a", name)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_token": 3}, "settings: expected url or name .*, got max_token"),
        ({"transport": "tcp"}, "transport: expected auto, channel, nixl, http or device, got tcp"),
        ({"check_weights": False}, "check_weights: expected on or off, got False"),
        ({"max_tokens": 0}, "max_tokens: expected .*, got 0"),
        ({"max_tokens": "many"}, "max_tokens: expected .*, got many"),
        ({"retry_seconds": -1}, "retry_seconds: expected .*, got -1"),
        ({"retry_seconds": None}, "retry_seconds: expected .*, got None"),
        ({"name": 3}, "name: expected .*, got 3"),
        ({"url": 3}, "url: expected text, got 3"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_settings({"url": "http://a"} | given, "a/b")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"hidden_size": 64}, "layer on http://a: hidden_size: expected 128, got 64"),
        ({"num_experts": 16}, "num_experts: expected 8, got 16"),
        ({"num_experts": None}, "num_experts: expected 8, got None"),
        ({"top_k": 4}, "top_k: expected 2, got 4"),
        ({"shared_experts": "included"}, "shared_experts: expected false, as SGLang computes them, got true"),
    ],
)
def test_a_layer_of_another_model_is_refused(changed: dict[str, Any], text: str) -> None:
    layer_of(METADATA).check_sizes("SGLang", 128, 8, 2)
    with pytest.raises(ValueError, match=text):
        layer_of(METADATA | changed).check_sizes("SGLang", 128, 8, 2)


def layer_of(metadata: dict[str, Any], **settings: Any) -> RemoteLayer:
    server: Any = SimpleNamespace(settings=PluginSettings("http://a", **settings))
    return RemoteLayer(server, "layer", 3, ModelMetadata(name="layer", datatype="BF16", **metadata))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    save_file(
        {"model.layers.3.mlp.experts.0.up_proj.weight": torch.randn(4, 8)}, tmp_path / "model.safetensors"
    )
    directory, here = str(tmp_path), weights_id(tmp_path, 3)
    check_weights([layer_of(METADATA | {"weights_id": here})], lambda: directory)
    other = METADATA | {"weights_id": "0" * 64}
    with pytest.raises(
        ValueError, match=f"layer on http://a: weights_id: expected {here}, of {directory} .*, got 0"
    ):
        check_weights([layer_of(other)], lambda: directory)
    check_weights([layer_of(other, check_weights="off")], lambda: "/nowhere")


@pytest.mark.parametrize(
    ("name", "is_expert"),
    [
        ("model.layers.3.mlp.experts.0.gate_proj.weight", True),
        ("model.layers.3.mlp.experts.0.gate_proj.weight_scale_inv", True),
        ("model.language_model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3.mlp.experts.down_proj_blocks", True),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", True),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", True),
        ("model.layers.3.block_sparse_moe.input_linear.weight", True),
        ("model.layers.3.block_sparse_moe.output_linear.weight", True),
        ("model.layers.3.feed_forward.experts.7.w1.weight", True),
        ("model.layers.3.moe.gate_proj.weight", True),
        ("transformer.blocks.3.ffn.experts.mlp.w1", True),
        ("model.layers.61.mlp.experts.255.down_proj.weight", True),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.3.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.3.mlp.shared_expert_gate.weight", False),
        ("model.layers.3.mlp.experts.e_score_correction_bias", False),
        ("model.layers.3.mlp.gate.e_score_correction_bias", False),
        ("model.layers.3.block_sparse_moe.router.layer.weight", False),
        ("model.layers.3.moe.gate.weight", False),
        ("model.layers.3.shared_mlp.input_linear.weight", False),
        ("model.layers.3.mlp.gate_proj.weight", False),
        ("model.layers.3.self_attn.q_proj.weight", False),
    ],
)
def test_names_of_experts(name: str, is_expert: bool) -> None:
    assert bool(EXPERTS.search(name)) == is_expert


def test_experts_stay_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("layers.3.mlp.experts.0.up_proj.weight", "norm.weight", "embed.weight")
    tensors = {name: torch.randn(4, 8) for name in names}
    save_file(tensors, tmp_path / "a.safetensors")
    asked: list[str] = []
    monkeypatch.setattr("safetensors.safe_open", lambda *given: Recording(*given, asked=asked))
    read = dict(tensors_of_others([str(tmp_path / "a.safetensors")]))
    assert sorted(asked) == sorted(read) == sorted(names[1:])
    for name, tensor in read.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)


class Recording:
    """A safetensors file that notes what is read of it."""

    def __init__(self, *given: str, asked: list[str]) -> None:
        self._file, self._asked = safe_open(*given), asked

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Any:
        self._asked.append(name)
        return self._file.get_tensor(name)


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
    layer = RemoteLayer(server, "layer", 3, ANY)
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


def test_a_call_of_the_gpu_that_fails_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the stream goes no further, so that no token is made before."""
    given: list[dict[str, Any]] = []
    ended: queue.Queue[Exception] = queue.Queue()

    class FailedChannel:
        max_tokens = 512

        def check(self) -> None:
            raise ServerUnreachableError("channel: a call's output has not come in time")

    def open_device_channel(models: Any, **options: Any) -> FailedChannel:
        given.append(options)
        return FailedChannel()

    def end_process(error: Exception) -> None:
        ended.put(error)
        threading.Event().wait()  # a daemon's thread, as the real one does not return

    monkeypatch.setattr(engine, "end_process", end_process)
    remote = RemoteServer(PluginSettings("http://127.0.0.1:1", transport="device"))
    monkeypatch.setattr(remote.client, "open_device_channel", open_device_channel)
    remote.open_device_channel(torch.device("cuda", 0), 2)
    assert isinstance(ended.get(timeout=60), ServerUnreachableError)
    assert given == [{"num_slots": 2, "device": "cuda:0", "nan_on_failure": False}]
    remote.client.close()


def test_two_microbatches_are_under_way_in_slots_of_their_own() -> None:
    channel = FakeChannel(8, 4)
    server: Any = SimpleNamespace(device_channel=None, channel=lambda x, num_slots: channel)
    layer = RemoteLayer(server, "layer", 3, ANY)
    batches = [
        (torch.randn(TOKENS, HIDDEN), torch.ones(TOKENS, TOP_K) * part, torch.rand(TOKENS, TOP_K))
        for part in (0, 1)
    ]
    calls = [layer.submit(*batch, part, 2) for part, batch in enumerate(batches)]
    for batch, call in zip(batches, calls, strict=True):
        out = torch.empty(TOKENS, HIDDEN)
        call.wait(out)
        torch.testing.assert_close(out, expected_of(*batch), rtol=0, atol=0)
