"""RoutedExperts without weights: vLLM's router chooses the experts, and a server computes them."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import Histogram
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, MoERunner, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
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
    """A mixin for MoERunner, which runs a layer: in a compiled model, as one operation.

    CUDA graphs are split at this operation. The next graph reads the output at the address that it had at
    capture, so the operation writes into a buffer that the previous graph allocated; vLLM's own operation
    allocates a new one for each call.
    """

    kind: Any
    _names: list[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        parameters = list(inspect.signature(cls.kind.forward).parameters.values())[1:]
        cls._names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

    def forward(self: Any, *args: Tensor | None, **kwargs: Tensor | None) -> Tensor:
        method = self._quant_method
        if not (torch.compiler.is_compiling() and isinstance(method, ExpertdMoEMethod) and method.is_split):
            return super().forward(*args, **kwargs)  # type: ignore[misc, no-any-return]
        given = dict(zip(self._names, args, strict=False)) | kwargs
        inputs = [given.get(name) for name in self._names]
        like = given.get("shared_experts_input")  # has the output's width even if routed experts are narrower
        out = torch.empty_like(given["hidden_states"] if like is None else like)
        torch.ops.expertd.experts(inputs, out, self.layer_name)
        return out


class ExpertdMoEMethod(FusedMoEMethodBase):
    """Takes the place of what the checkpoint's quantization has: no weights, and `apply` calls the server.

    is_split  whether CUDA graphs are split at its layer, because a graph cannot capture its calls
    """

    def __init__(self, moe: Any, remote: RemoteLayer) -> None:
        super().__init__(moe)
        remote.check_sizes("vLLM", moe.hidden_dim, moe.num_logical_experts, moe.experts_per_token)
        self.remote, self.is_split = remote, not makes_device_calls(get_current_vllm_config())
        self._seconds = _WAIT.labels(remote.name)
        self._calls: dict[int, tuple[slice, Call | None]] = {}  # by microbatch
        self._num_calls = 0
        self._sample: Any = None
        self._microbatches = max(1, get_current_vllm_config().parallel_config.num_ubatches)
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
    ) -> Tensor:
        """This rank's tokens, and zeros for those of other tensor parallel ranks; the runner adds all up."""
        out = torch.empty_like(x)
        self.submit(x, topk_ids, topk_weights)
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        self.wait(out)
        return out

    @eager_break_during_capture  # of vLLM's breakable CUDA graphs
    def submit(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        rows, microbatch, call = self._rows(len(x)), dbo_current_ubatch_id(), None
        if rows.start < rows.stop:
            if rows.stop - rows.start < len(x):
                x, topk_ids, topk_weights = x[rows], topk_ids[rows], topk_weights[rows]
            call = self.remote.submit(x, topk_ids, topk_weights, microbatch, self._microbatches)
        self._calls[microbatch] = rows, call

    @eager_break_during_capture
    def wait(self, out: Tensor) -> None:
        dbo_yield()  # to the other microbatch, if there are two
        rows, call = self._calls.pop(dbo_current_ubatch_id())
        if rows.stop - rows.start < len(out):
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

    def _rows(self, num_rows: int) -> slice:
        """Those that this rank asks for: a share of the batch's tokens, without padding."""
        num_tokens = None if _is_captured() else _num_tokens()
        if (
            self.moe.moe_parallel_config.is_sequence_parallel
        ):  # vLLM has shared them out, in equal numbers of rows
            end = num_rows if num_tokens is None else num_tokens - self._rank * num_rows
            return slice(0, min(max(end, 0), num_rows))
        end = num_rows if num_tokens is None else min(num_tokens, num_rows)
        return slice(end * self._rank // self._ranks, end * (self._rank + 1) // self._ranks)


def _is_captured() -> bool:
    """Whether a CUDA graph gets what is enqueued now: for any tokens, as many as it has rows."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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


def _experts(inputs: list[Tensor | None], out: Tensor, layer: str) -> None:
    out.copy_(get_forward_context().no_compile_layers[layer](*inputs))


def _fake(inputs: list[Tensor | None], out: Tensor, layer: str) -> None:
    pass


_OPS = torch.library.Library("expertd", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("experts", _experts, ["out"], _fake, _OPS)
