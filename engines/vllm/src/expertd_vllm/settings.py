"""The plugin's settings, and what of vLLM's configuration it cannot work with."""

from typing import Any

from expertd_client.engine import SLOTS, PluginSettings, expect, make_settings


def read_settings(config: Any) -> PluginSettings:
    """Those of a VllmConfig, `--additional-config '{"expertd": {...}}'`. Raises ValueError."""
    additional = config.additional_config
    given = additional.get("expertd") if isinstance(additional, dict) else None
    if not isinstance(given, dict) or not given.get("url"):
        example = '--additional-config \'{"expertd": {"url": "http://localhost:8000"}}\''
        raise ValueError(
            f"load_format expertd: expected the URL of a server, as in {example}, got {additional}"
        )
    # Few large requests: the server reads its weights for each.
    requests = SLOTS * config.parallel_config.tensor_parallel_size
    max_tokens = -(-config.scheduler_config.max_num_batched_tokens // requests)
    return make_settings({"max_tokens": max_tokens} | given, config.model_config.model)


def check_config(config: Any) -> None:
    """Raises ValueError for what vLLM is asked to do and calls to a server cannot."""

    def check(is_good: bool, name: str, expected: str, got: object) -> None:
        expect(is_good, f"load_format expertd: {name}", expected, got)

    graphs, parallel = config.compilation_config.cudagraph_mode, config.parallel_config
    pieces = "PIECEWISE (-cc.cudagraph_mode=PIECEWISE), as full CUDA graphs need transport device"
    is_full = bool(graphs and graphs.has_full_cudagraphs()) and not makes_device_calls(config)
    check(not is_full, "cudagraph_mode", pieces, graphs and graphs.name)
    check(not parallel.enable_eplb, "enable_eplb", "false, as the server places experts itself", True)
    ranks = parallel.prefill_context_parallel_size
    check(ranks == 1, "prefill_context_parallel_size", "1", ranks)
    if config.lora_config is not None:
        targets = config.lora_config.target_modules
        has_experts = targets is None or any("experts" in target.split(".") for target in targets)
        check(not has_experts, "lora_target_modules", "modules other than experts", targets)


def makes_device_calls(config: Any) -> bool:
    """Whether a VllmConfig's GPUs make calls by themselves."""
    additional = config.additional_config
    given = additional.get("expertd") if isinstance(additional, dict) else None
    return isinstance(given, dict) and given.get("transport") == "device"
