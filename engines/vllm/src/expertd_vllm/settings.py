"""The plugin's settings, and what of vLLM's configuration it cannot work with."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """`--additional-config '{"expertd": {...}}'`.

    url            of the server
    name           of the checkpoint there, whose layers are {name}.layers.{N}; "": as the server names it
    transport      auto, channel or http, as in expertd-client
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
        expect("transport", self.transport, "auto", "channel", "http")
        expect("check_weights", self.check_weights, "on", "off")


def read_settings(config: Any) -> Settings:
    """Those of a VllmConfig. Raises ValueError."""
    additional = config.additional_config
    given = additional.get("expertd") if isinstance(additional, dict) else None
    if not isinstance(given, dict) or not given.get("url"):
        raise ValueError(
            'load_format expertd: expected the URL of a server, as in --additional-config \'{"expertd": '
            f'{{"url": "http://localhost:8000"}}}}\', got {additional!r}'
        )
    names = [field.name for field in fields(Settings)]
    for key in given:
        expect("expertd's settings", key, *names)
    return Settings(**{"name": _served_name(config.model_config.model), **given})


def check_config(config: Any) -> None:
    """Raises ValueError for what vLLM is asked to do and calls to a server cannot."""
    graphs = config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.has_full_cudagraphs():
        raise _refusal(
            f"CUDA graphs around calls to the server, not over them: -cc.cudagraph_mode=PIECEWISE, got {graphs.name}"
        )
    if config.parallel_config.enable_eplb:
        raise _refusal("no --enable-eplb: the server balances its experts itself")
    if config.parallel_config.prefill_context_parallel_size > 1:
        raise _refusal("--prefill-context-parallel-size 1")
    lora = config.lora_config
    if lora is not None and (lora.target_modules is None or any("experts" in m for m in lora.target_modules)):
        raise _refusal(f"--lora-target-modules without experts, got {lora.target_modules}")


def expect(name: str, got: object, *allowed: object) -> None:
    """Raises ValueError unless `got` is allowed."""
    if got not in allowed:
        raise ValueError(f"{name}: expected {' or '.join(map(str, allowed))}, got {got}")


def _refusal(text: str) -> ValueError:
    return ValueError(f"load_format expertd: expected {text}")


def _served_name(model: str) -> str:
    """By what `expertd serve --model` calls it: a directory's name, or the model's in the hub's cache."""
    path = Path(model).absolute()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rsplit("--", 1)[-1]
    return path.name
