"""RoutedExperts without weights: vLLM's router chooses the experts, and a server computes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import Histogram
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, MoERunner, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.runner.moe_runner import get_layer_from_name
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_yield

from expertd_client import engine
from expertd_client.engine import Call, DeviceCall, EnqueuedCall, RemoteLayer, expect, server_of
from expertd_vllm.settings import check_config, makes_device_calls, read_settings

_KINDS = ("RoutedExperts", "GptOssRoutedExperts", "DbrxExperts", "TransformersRoutedExperts")
_SPLITTING = "expertd::experts"  # where CUDA graphs are split
_SAMPLED = 8  # on a stream, the time of one request in this many is observed
_WAIT = Histogram(
    "expertd_vllm_wait_seconds",
    "Time a process of vLLM waited for the routed experts of a layer.",
    ["layer"],
    buckets=[step * 10**power for power in (-5, -4, -3, -2, -1) for step in (1, 2, 5)] + [1, 10, 60],
)


@contextmanager
def replaced(config: Any, model_config: Any) -> Iterator[None]:
    """Have models that are made within have no routed experts. Raises ValueError for what cannot work."""
    check_config(config)
    if current_platform.is_cpu():
        # vLLM's attention uses AMX, but only oneDNN asks the system for it, which ends the process otherwise.
        # No step calls oneDNN if all matrices have at most 1 MiB and the prompts at most four tokens.
        torch.cpu._init_amx()
    get_model_architecture(model_config)  # imports the model's module, and so its kind of RoutedExperts
    kinds = {
        kind.__name__: type(f"Remote{kind.__name__}", (mixin, kind), {"kind": kind})
        for base, mixin in ((RoutedExperts, Remote), (MoERunner, RemoteRunner))
        for kind in _with_subclasses(base)
    }
    others = [name for name in kinds if name in op_registry_oot]
    expect(not others, "load_format expertd: classes of layers", "none of another plugin", others)
    splitting = config.compilation_config.splitting_ops
    if splitting and _SPLITTING not in splitting and not makes_device_calls(config):
        splitting.append(_SPLITTING)
    for name, kind in kinds.items():
        PluggableLayer.register_oot(kind, name=name)
    try:
        yield
    finally:  # LoRA, of this model or another one, looks for vLLM's own classes
        for name in kinds:
            del op_registry_oot[name]


def check_weights(model: torch.nn.Module, find_directory: Callable[[], str]) -> None:
    """Raises ValueError if the server's experts are not those of the checkpoint here."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    layers = [method.remote for method in methods if isinstance(method, ExpertdMoEMethod)]
    if get_tensor_model_parallel_rank() == 0:
        engine.check_weights(layers, find_directory)


class Remote:
    """A mixin for RoutedExperts, and for what models make of it."""

    kind: Any

    def _get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        config = get_current_vllm_config()
        if config.load_config.load_format not in ("expertd", "expertd_dummy"):
            return super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]
        weighs_input = self.apply_router_weight_on_input
        kind = self.kind.__name__
        expect(kind in _KINDS, f"{prefix}: experts", " or ".join(_KINDS), kind)
        expect(not weighs_input, f"{prefix}: routing weights", "on outputs of experts", "on their inputs")
        expect("mtp" not in prefix.split("."), "layer", "one that the server numbers", prefix)
        settings = read_settings(config)
        return ExpertdMoEMethod(moe_config, server_of(settings).layer(extract_layer_index(prefix)))


class RemoteRunner:
    """A mixin for MoERunner, which runs a layer: as two operations.

    CUDA graphs capture `expertd::route`, which is vLLM's own: router and shared experts. They are split at
    `expertd::experts`, the call, unless GPUs make calls by themselves. The next graph reads the output at the
    address that it had at capture, so the call writes into a buffer that the previous graph allocated.
    """

    def _select_forward(self: Any) -> Callable[..., Any]:
        if isinstance(self._quant_method, ExpertdMoEMethod):
            return self._run  # type: ignore[no-any-return]
        return super()._select_forward()  # type: ignore[misc, no-any-return]

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if hasattr(self, "_forward_super") and isinstance(self._quant_method, ExpertdMoEMethod):
            # Of the transformers backend, whose models choose: ids and weights take the place of logits.
            return self._forward_super(hidden_states, args)  # type: ignore[no-any-return]
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]

    def _run(
        self: Any, x: Tensor, logits: Any, shared_input: Any, input_ids: Any, name: LayerNameType, _: int
    ) -> Any:
        """In place of `vllm::moe_forward` and `vllm::moe_forward_shared`."""
        if isinstance(logits, tuple):
            topk_ids, topk_weights, *shared = logits[0].int(), logits[1].float()
        else:
            top_k = self.moe_config.experts_per_token
            shared_input = None if self.shared_experts is None else shared_input
            topk_ids, topk_weights, *shared = torch.ops.expertd.route(
                x, logits, shared_input, input_ids, top_k, name
            )
        out = torch.empty_like(x)
        torch.ops.expertd.experts(x, topk_ids, topk_weights, out, self.layer_name)
        return (*shared, out) if shared else out


class ExpertdMoEMethod(FusedMoEMethodBase):
    """Takes the place of what the checkpoint's quantization has: no weights, but calls to the server."""

    def __init__(self, moe: Any, remote: RemoteLayer) -> None:
        super().__init__(moe)
        remote.check_sizes("vLLM", moe.hidden_dim, moe.num_logical_experts, moe.experts_per_token)
        config = get_current_vllm_config()
        self.remote, self._is_compiled = remote, config.compilation_config.mode != CompilationMode.NONE
        if not makes_device_calls(config):
            # Of vLLM's breakable CUDA graphs.
            self.call = eager_break_during_capture(self.call)  # type: ignore[method-assign]
        self._seconds = _WAIT.labels(remote.name)
        self._calls: dict[int, tuple[slice, Call | None]] = {}  # by microbatch
        self._num_calls = 0
        self._sample: Any = None
        self._microbatches = max(1, config.parallel_config.num_ubatches)
        self._ranks, self._rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """None."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """There are none; but all layers are known."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.remote.server.open_device_channel(device, self._microbatches)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any) -> tuple[int, int]:
        return hidden_size, intermediate_size  # all-to-all backends pad; no padding here

    @property
    def supports_internal_mk(self) -> bool:
        return True  # so that the runner does not gather the tokens of all data parallel ranks

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        return True  # `apply` calls them

    @property
    def is_monolithic(self) -> bool:
        return False  # vLLM's router chooses the experts

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Any:
        """The end of `expertd::route`: ids and weights, in place of outputs.

        The server begins before shared experts if the GPU sends `x` at once, or if `x` stays until `call`: a
        compiler may use its memory again before.
        """
        topk_ids, topk_weights = topk_ids.int().contiguous(), topk_weights.float().contiguous()
        if self.remote.makes_device_call(x):
            self._submit(x, topk_ids, topk_weights)
        elif _is_captured(x):  # and not computed, while `call` is made: ids are whatever was there
            self._calls[dbo_current_ubatch_id()] = slice(0, 0), None
        elif not self._is_compiled:
            self._submit(x, topk_ids, topk_weights)
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        return topk_ids, topk_weights

    def call(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        """This rank's tokens, and zeros for those of other tensor parallel ranks; the runner adds all up."""
        if dbo_current_ubatch_id() not in self._calls:
            self._submit(x, topk_ids, topk_weights)
        dbo_yield()  # to the other microbatch, if there are two
        self._wait(out)

    def _submit(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        num_rows, microbatch, call = x.shape[0], dbo_current_ubatch_id(), None
        rows = self._rows(num_rows, _is_captured(x))
        if rows.start < rows.stop:
            if rows.stop - rows.start < num_rows:
                x, topk_ids, topk_weights = x[rows], topk_ids[rows], topk_weights[rows]
            call = self.remote.submit(x, topk_ids, topk_weights, microbatch, self._microbatches)
        self._calls[microbatch] = rows, call

    def _wait(self, out: Tensor) -> None:
        rows, call = self._calls.pop(dbo_current_ubatch_id())
        if rows.stop - rows.start < out.shape[0]:
            out[: rows.start].zero_()
            out[rows.stop :].zero_()
            out = out[rows]
        if isinstance(call, EnqueuedCall):
            call.wait(out)
            self._observe(call.last)
        elif isinstance(call, DeviceCall):
            call.wait(out)
        elif call is not None:
            with self._seconds.time():
                call.wait(out)

    def _observe(self, request: Any) -> None:
        """Of a few requests, the time that the server says, some steps later: this thread is ahead."""
        self._num_calls += 1
        turn = self._num_calls % _SAMPLED
        if turn == 0:
            self._sample = request
        elif turn == _SAMPLED // 2 and self._sample is not None and (times := self._sample.times()):
            self._seconds.observe(sum(times))

    def _rows(self, num_rows: int, is_captured: bool) -> slice:
        """Those that this rank asks for: a share of the batch's tokens, without padding."""
        num_tokens = None if is_captured else _num_tokens()
        if (
            self.moe.moe_parallel_config.is_sequence_parallel
        ):  # vLLM has shared them out, in equal numbers of rows
            end = num_rows if num_tokens is None else num_tokens - self._rank * num_rows
            return slice(0, min(max(end, 0), num_rows))
        end = num_rows if num_tokens is None else min(num_tokens, num_rows)
        return slice(end * self._rank // self._ranks, end * (self._rank + 1) // self._ranks)


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph gets what is enqueued now: for any tokens, as many as it has rows."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _num_tokens() -> int | None:
    """Of this step's batch, without the padding behind them; None: nothing says how many."""
    context = get_forward_context()
    if context.attn_metadata is None:
        return 0  # memory is measured, or only other data parallel ranks have requests
    kept = context.additional_kwargs
    if "expertd" not in kept:  # at the step's first layer: a GPU's answer takes time
        kept["expertd"] = _count_tokens(context)
    number: int | None = kept["expertd"]
    return number


def _count_tokens(context: Any) -> int | None:
    """By what attention knows on the host; dummy batches of data parallel ranks look real there."""
    known = [getattr(of, "num_actual_tokens", None) for of in dict(context.attn_metadata).values()]
    numbers = [number for number in known if number is not None]
    if context.is_padding is not None and (context.dp_metadata is not None or not numbers):
        return int(context.is_padding.logical_not().sum())  # waits for the GPU
    return max(numbers, default=None)


def _with_subclasses(kind: type) -> list[type]:
    subclasses: list[type] = kind.__subclasses__()
    kinds = [each for each in subclasses if not issubclass(each, (Remote, RemoteRunner))]
    return [kind, *(found for each in kinds for found in _with_subclasses(each))]


def _route(
    x: Tensor,
    logits: Tensor,
    shared_input: Tensor | None,
    input_ids: Tensor | None,
    top_k: int,
    name: LayerNameType,
) -> list[Tensor]:
    """Ids and weights [n, top_k] of experts, and the output of shared experts, if there are any."""
    runner: Any = get_layer_from_name(_resolve_layer_name(name))
    got = runner._forward_impl(x, logits, shared_input, input_ids)
    return list(got) if shared_input is None else [*got[1], got[0]]


def _route_fake(
    x: Tensor,
    logits: Tensor,
    shared_input: Tensor | None,
    input_ids: Tensor | None,
    top_k: int,
    name: LayerNameType,
) -> list[Tensor]:
    shape = x.shape[0], top_k
    routing = [x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)]
    return routing if shared_input is None else [*routing, torch.empty_like(shared_input)]


def _experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, name: str) -> None:
    get_forward_context().no_compile_layers[name]._quant_method.call(x, topk_ids, topk_weights, out)


def _experts_fake(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor, name: str) -> None:
    pass


_OPS = torch.library.Library("expertd", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("route", _route, [], _route_fake, _OPS)
direct_register_custom_op("experts", _experts, ["out"], _experts_fake, _OPS)
