"""The plugin's settings, and what of vLLM's configuration it cannot work with."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """`--additional-config '{"expertd": {...}}'`.

    url            of the server
    name           of the checkpoint there, whose layers are {name}.layers.{N}; "": as the server names it
    transport      auto, channel or http, as in expertd-client; device: the GPU makes calls by itself, also
                   from full CUDA graphs, and large batches go over a channel
    max_tokens     of a request over a channel; larger batches are cut
    retry_seconds  how long a call waits for a server that has gone, before it fails
    check_weights  on: the server's experts must be those of the checkpoint here; off: only sizes are compared
    """

    url: str
    name: str = ""
    transport: str = "auto"
    max_tokens: int = 1024
    retry_seconds: float = 60.0
    check_weights: str = "on"

    def __post_init__(self) -> None:
        is_size = isinstance(self.max_tokens, int) and self.max_tokens > 0
        is_time = isinstance(self.retry_seconds, (int, float)) and self.retry_seconds >= 0
        expect(isinstance(self.url, str), "url", "text", self.url)
        expect(isinstance(self.name, str), "name", "text", self.name)
        expect(
            self.transport in ("auto", "channel", "http", "device"),
            "transport",
            "auto, channel, http or device",
            self.transport,
        )
        expect(is_size, "max_tokens", "1 or more", self.max_tokens)
        expect(is_time, "retry_seconds", "0 or more", self.retry_seconds)
        expect(self.check_weights in ("on", "off"), "check_weights", "on or off", self.check_weights)


def read_settings(config: Any) -> Settings:
    """Those of a VllmConfig. Raises ValueError."""
    additional = config.additional_config
    given = additional.get("expertd") if isinstance(additional, dict) else None
    if not isinstance(given, dict) or not given.get("url"):
        example = '--additional-config \'{"expertd": {"url": "http://localhost:8000"}}\''
        raise ValueError(
            f"load_format expertd: expected the URL of a server, as in {example}, got {additional}"
        )
    names = [field.name for field in fields(Settings)]
    for key in given:
        expect(key in names, "expertd's settings", " or ".join(names), key)
    return Settings(**{"name": _served_name(config.model_config.model), **given})


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


def expect(is_good: bool, name: str, expected: object, got: object) -> None:
    """Raises ValueError unless `is_good`."""
    if not is_good:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _served_name(model: str) -> str:
    """By what `expertd serve --model` calls it: a directory's name, or the model's in the hub's cache."""
    path = Path(model).absolute()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rsplit("--", 1)[-1]
    return path.name
