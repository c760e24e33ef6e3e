"""The plugin's settings, and what of SGLang's configuration it cannot work with."""

import json
import os

from sglang.srt.layers.moe import get_moe_a2a_backend, is_moe_input_scattered_across_dp_ranks
from sglang.srt.runtime_context import get_exec, get_flags, get_lora, get_model, get_parallel

from expertd_client.engine import PluginSettings, expect, make_settings

_EXAMPLE = '{"url": "http://localhost:8000"}'
_FORMATS = ("auto", "safetensors", "dummy")
_PROJECTIONS = {"all", "gate_up_proj", "gate_proj", "up_proj", "down_proj"}  # to LoRA, those of experts, too


def read_settings(model: str) -> PluginSettings:
    """Those of a process that serves `model`: JSON in SGLANG_EXPERTD. Raises ValueError."""
    text = os.environ["SGLANG_EXPERTD"]
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    is_good = isinstance(given, dict) and bool(given.get("url"))
    expect(is_good, "SGLANG_EXPERTD", f"settings with the URL of a server, as {_EXAMPLE}", text)
    return make_settings(given, model)


def check_config(settings: PluginSettings) -> None:
    """Raises ValueError for what SGLang is asked to do and calls to a server cannot."""
    parallel, a2a = get_parallel(), get_moe_a2a_backend()
    expect(
        not get_exec().moe.enable_eplb, "enable_eplb", "false, as the server places experts itself", "true"
    )
    location = get_exec().moe.init_expert_location
    expect(location == "trivial", "init_expert_location", "trivial", location)
    expect(a2a.is_none(), "moe_a2a_backend", "none, as no tokens go to other ranks", a2a.value)
    expect(parallel.moe_ep_size == 1, "ep_size", "1, as the server has all experts", parallel.moe_ep_size)
    expect(
        not is_moe_input_scattered_across_dp_ranks(),
        "tokens of a layer",
        "all on each rank",
        "a part on each",
    )
    two = get_exec().overlap.enable_two_batch_overlap
    expect(not two, "enable_two_batch_overlap", "false", "true")
    compiled = get_exec().graph.enable_torch_compile
    expect(not compiled, "enable_torch_compile", "false", "true")
    is_draft = get_flags().moe.in_speculative_scope
    expect(not is_draft, "the draft model", "one without routed experts", "routed experts")
    load_format, mode = get_model().load_format, get_model().startup_weight_load_mode
    expect(load_format in _FORMATS, "load_format", " or ".join(_FORMATS), load_format)
    expect(mode == "serial", "startup_weight_load_mode", "serial", mode)
    lora = get_lora()
    if lora.enable_lora or lora.lora_paths:
        targets = lora.lora_target_modules
        is_good = targets is not None and not _PROJECTIONS & set(targets)
        expect(is_good, "lora_target_modules", "those of attention, named", targets)
    graphs, makes_device_calls = get_exec().graph.cuda_graph_config, settings.transport == "device"
    decode, prefill = graphs.decode.backend, graphs.prefill.backend
    off = "disabled (--cuda-graph-backend-{}=disabled)"
    expected = off.format("decode") + ", or the setting transport: device"
    expect(makes_device_calls or decode == "disabled", "decode CUDA graphs", expected, decode)
    expect(prefill == "disabled", "prefill CUDA graphs", off.format("prefill"), prefill)
