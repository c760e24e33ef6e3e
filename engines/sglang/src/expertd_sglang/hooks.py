"""What SGLang's functions do in their place: layers without weights, and files whose experts stay unread."""

import re
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.runtime_context import get_model, get_parallel

from expertd_client.engine import EXPERTS, check_weights, expect, server_of, tensors_of_others
from expertd_sglang.experts import ExpertdFusedMoEMethod
from expertd_sglang.settings import check_config, read_settings

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts$")


def make_experts(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """FusedMoE.__init__, with experts on the server. Raises ValueError for those that cannot be there."""
    given = signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    layer, has = args[0], given.arguments
    if layer.is_shared_fused_moe:  # SGLang computes these
        return original(*args, **kwargs)
    settings, prefix, kind = read_settings(get_model().model_path), has["prefix"], type(layer)
    check_config(settings)

    def check(is_good: bool, name: str, expected: str, got: object) -> None:
        expect(is_good, f"{prefix}: {name}", expected, got)

    found, number = _LAYER.search(prefix), has["layer_id"]
    is_known = found is not None and int(found[1]) == number
    expect(is_known, "layer", f"a name with layers.{number} and experts", prefix or "none")
    check(kind is FusedMoE and has["quant_method"] is None, "experts", "FusedMoE's own", kind.__name__)
    weighs_input = has["apply_router_weight_on_input"]
    check(not weighs_input, "routing weights", "on outputs of experts", "on their inputs")
    check(not has["no_combine"], "outputs of experts", "their sum", "each by itself")
    shared = has["num_fused_shared_experts"]
    check(not shared, "fused shared experts", "0 (--disable-shared-experts-fusion)", shared)
    remote = server_of(settings).layer(number)
    remote.check_sizes("SGLang", has["hidden_size"], has["num_experts"], has["top_k"])
    has["quant_method"] = method = ExpertdFusedMoEMethod(remote)
    original(*given.args, **given.kwargs)
    used = layer.quant_method
    return check(used is method, "quant_method", "the server's", type(used).__name__)


def read_weights(original: Callable[..., Any], loader: Any, model_config: Any, model: torch.nn.Module) -> Any:
    """DefaultModelLoader._get_all_weights, once the server is known to have the checkpoint's experts."""
    parameters = model.named_parameters()
    left = [name for name, tensor in parameters if tensor.ndim == 3 and EXPERTS.search(name)]
    expect(not left, "experts", "those of SGLang's FusedMoE", left[:1])
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    layers = [method.remote for method in methods if isinstance(method, ExpertdFusedMoEMethod)]
    if layers:
        path, revision = model_config.model_path, model_config.revision
        directory, files, use_safetensors = loader._prepare_weights(path, revision, True)
        expect(use_safetensors, "files", "safetensors", files[0])
        if get_parallel().tp_rank == 0:
            check_weights(layers, lambda: directory)
    return original(loader, model_config, model)


def read_files(
    original: Callable[..., Any], hf_weights_files: Sequence[str], *args: Any, **kwargs: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors in files of safetensors, but for the experts."""
    return tensors_of_others(hf_weights_files)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__": make_experts,
    "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights": read_weights,
    "sglang.srt.model_loader.weight_utils.safetensors_weights_iterator": read_files,
    "sglang.srt.model_loader.weight_utils.buffered_multi_thread_safetensors_weights_iterator": read_files,
}
