"""SGLang's modules as far as the plugin uses them; tests/test_sources.py compares them with SGLang's own.

Parameters and fields have SGLang's names and order; functions do what the tests need.
"""

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

# By the paths by which SGLang's configuration is read.
FIELDS: dict[str, dict[str, Any]] = {
    "exec.moe": {"enable_eplb": False, "init_expert_location": "trivial"},
    "exec.overlap": {"enable_two_batch_overlap": False},
    "exec.graph": {"cuda_graph_config": None, "enable_torch_compile": False},
    "model": {"model_path": "Qwen/small", "load_format": "auto", "startup_weight_load_mode": "serial"},
    "lora": {"enable_lora": None, "lora_paths": None, "lora_target_modules": None},
}
PARALLEL = {"tp_rank": 0, "moe_ep_size": 1, "moe_tp_rank": 0, "moe_tp_size": 1}
state = SimpleNamespace()


def reset() -> None:
    """The configuration by default, without CUDA graphs."""
    parts = {path: SimpleNamespace(**fields) for path, fields in FIELDS.items()}
    phases = {phase: SimpleNamespace(backend="disabled") for phase in ("decode", "prefill")}
    parts["exec.graph"].cuda_graph_config = SimpleNamespace(**phases)
    kinds = {path.partition(".")[2]: part for path, part in parts.items() if path.startswith("exec.")}
    state.exec, state.model, state.lora = SimpleNamespace(**kinds), parts["model"], parts["lora"]
    state.flags = SimpleNamespace(moe=SimpleNamespace(in_speculative_scope=False))
    state.parallel, state.a2a = SimpleNamespace(**PARALLEL), MoeA2ABackend.NONE
    state.is_scattered = state.is_cuda = False


class MoeA2ABackend(Enum):
    NONE = "none"
    DEEPEP = "deepep"

    def is_none(self) -> bool:
        return self is MoeA2ABackend.NONE


def get_moe_a2a_backend() -> Any:
    return state.a2a


def is_moe_input_scattered_across_dp_ranks() -> bool:
    return bool(state.is_scattered)


def is_cuda() -> bool:
    return bool(state.is_cuda)


def get_exec() -> Any:
    return state.exec


def get_model() -> Any:
    return state.model


def get_lora() -> Any:
    return state.lora


def get_flags() -> Any:
    return state.flags


def get_parallel() -> Any:
    return state.parallel


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: list[tuple[str, Callable[..., Any]]] = []  # noqa: RUF012

    @classmethod
    def register(
        cls, target: str, hook: Callable[..., Any], hook_type: Any = None, *, source: Any = None
    ) -> None:
        assert hook_type is HookType.AROUND
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.hooks:
            owner, _, name = target.rpartition(".")
            obj = pkgutil.resolve_name(owner)
            setattr(obj, name, _wrapped(getattr(obj, name), hook))


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer: Any) -> None:
        return


class FusedMoEMethodBase(QuantizeMethodBase):
    runner: Any = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: Any,
        **extra_weight_attrs: Any,
    ) -> None:
        """For subclasses."""

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """For subclasses."""

    def get_moe_runner_backend(self, layer: Any) -> Any:
        return self.runner.runner_backend if self.runner is not None else None

    def get_moe_routing_method_type(self, layer: Any, requested_method: Any) -> Any:
        return requested_method

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """For subclasses."""


class StandardTopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class BypassedTopKOutput(NamedTuple):
    hidden_states: Tensor
    raw_router_logits: Tensor
    topk_config: Any
    num_token_non_padded: Any = None
    expert_location_dispatch_info: Any = None

    def to_standard(self, layer_id: int | None = None) -> StandardTopKOutput:
        weights, ids = self.raw_router_logits.softmax(-1).topk(self.topk_config.top_k)
        return StandardTopKOutput(weights, ids, self.raw_router_logits)


class TopKOutputChecker:
    @staticmethod
    def format_is_standard(topk_output: Any) -> bool:
        return isinstance(topk_output, StandardTopKOutput)

    @staticmethod
    def format_is_bypassed(topk_output: Any) -> bool:
        return isinstance(topk_output, BypassedTopKOutput)


class StandardDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Any
    topk_output: Any
    hidden_states_pre_quant: Any = None


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


class FusedMoE(torch.nn.Module):
    is_shared_fused_moe = False

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        top_k: int | None = None,
        num_fused_shared_experts: int = 0,
        params_dtype: Any = None,
        reduce_results: bool = False,
        quant_config: Any = None,
        prefix: str = "",
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        use_presharded_weights: bool = False,
        inplace: bool = True,
        no_combine: bool = False,
        routed_scaling_factor: float | None = None,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
        gemm1_clamp_limit: float | None = None,
        swiglu_limit: float | None = None,
        use_weight_loader_fused: bool = False,
        with_bias: bool = False,
        routing_method_type: Any = None,
        is_gated: bool = True,
        gate_up_interleaved: bool = True,
        enable_qwen35_fp8_deferred_finalize: bool = False,
        quant_method: Any = None,
        uses_expert_location: bool = True,
    ) -> None:
        super().__init__()
        self.moe_tp_rank, self.moe_tp_size = state.parallel.moe_tp_rank, state.parallel.moe_tp_size
        self.quant_method = state.wrap(quant_method) if hasattr(state, "wrap") else quant_method
        if self.quant_method is None:  # as plain SGLang
            self.w13_weight = torch.nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
            return
        self.quant_method.create_weights(
            layer=self,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size // self.moe_tp_size,
            params_dtype=params_dtype,
            weight_loader=None,
            with_bias=with_bias,
            moe_intermediate_size=intermediate_size,
        )
        config = SimpleNamespace(routed_scaling_factor=routed_scaling_factor)
        self.quant_method.create_moe_runner(self, config)
        self.runner_backend = self.quant_method.get_moe_runner_backend(self)
        self.quant_method.get_moe_routing_method_type(self, routing_method_type)

    def forward(self, hidden_states: Tensor, topk_output: Any) -> Tensor:
        dispatched = StandardDispatchOutput(hidden_states, None, topk_output)
        (combined,) = self.quant_method.apply(layer=self, dispatch_output=dispatched)
        out: Tensor = combined
        return out


class DefaultModelLoader:
    """Of a directory with files that the test names."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def _prepare_weights(
        self,
        model_name_or_path: str,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None = None,
    ) -> tuple[str, list[str], bool]:
        return model_name_or_path, self.files, self.files[0].endswith(".safetensors")

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        iterate = sys.modules["sglang.srt.model_loader.weight_utils"].safetensors_weights_iterator
        yield from iterate(self.files, disable_mmap=False)


def safetensors_weights_iterator(
    hf_weights_files: list[str],
    disable_mmap: bool = False,
    prefetch: bool = False,
    prefetch_num_threads: int = 4,
    drop_cache_after_load: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    raise AssertionError("expected nothing to read experts")


def buffered_multi_thread_safetensors_weights_iterator(
    hf_weights_files: list[str],
    max_workers: int,
    disable_mmap: bool = False,
    prefetch: bool = False,
    prefetch_num_threads: int = 4,
    drop_cache_after_load: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    raise AssertionError("expected nothing to read experts")


# Where SGLang defines them, and the module that the plugin imports them from, if it is another one.
DEFINED: dict[str, list[Any]] = {
    "sglang.srt.layers.quantization.base_config": [QuantizeMethodBase, FusedMoEMethodBase],
    "sglang.srt.layers.moe.utils": [
        MoeA2ABackend,
        get_moe_a2a_backend,
        is_moe_input_scattered_across_dp_ranks,
    ],
    "sglang.srt.layers.moe.token_dispatcher.standard": [StandardDispatchOutput, StandardCombineInput],
    "sglang.srt.layers.moe.topk": [StandardTopKOutput, BypassedTopKOutput, TopKOutputChecker],
    "sglang.srt.layers.moe.fused_moe_triton.layer": [FusedMoE],
    "sglang.srt.model_loader.loader": [DefaultModelLoader],
    "sglang.srt.model_loader.weight_utils": [
        safetensors_weights_iterator,
        buffered_multi_thread_safetensors_weights_iterator,
    ],
    "sglang.srt.plugins.hook_registry": [HookRegistry, HookType],
    "sglang.srt.runtime_context": [get_exec, get_model, get_lora, get_flags, get_parallel],
    "sglang.srt.utils.common": [is_cuda],
}
EXPORTED = {
    "sglang.srt.layers.moe.utils": "sglang.srt.layers.moe",
    "sglang.srt.layers.moe.token_dispatcher.standard": "sglang.srt.layers.moe.token_dispatcher",
    "sglang.srt.utils.common": "sglang.srt.utils",
}


def install() -> None:
    """Have `import sglang` find these."""
    for name, objects in DEFINED.items():
        for each in {name, EXPORTED.get(name, name)}:
            module = _module(each)
            for obj in objects:
                setattr(module, obj.__name__, obj)
    reset()


def _module(name: str) -> ModuleType:
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, module)
    return sys.modules[name]
