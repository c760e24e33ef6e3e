"""Settings, and what of vLLM's configuration is refused, each in a sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from expertd_client.engine import PluginSettings
from expertd_vllm.settings import check_config, read_settings


def config(additional: Any = None, model: str = "Qwen/Qwen3-30B-A3B", **changed: Any) -> Any:
    """The parts of a VllmConfig that are looked at; changed: by name, with __ for dots."""
    made = SimpleNamespace(
        additional_config=additional,
        model_config=SimpleNamespace(model=model),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE),
        parallel_config=SimpleNamespace(
            enable_eplb=False, prefill_context_parallel_size=1, tensor_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        lora_config=None,
    )
    for name, value in changed.items():
        *owners, last = name.split("__")
        owner = made
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, last, value)
    return made


def test_layers_are_named_as_the_model() -> None:
    assert read_settings(config({"expertd": {"url": "http://a"}}, "Qwen/small")).name == "small"


@pytest.mark.parametrize(
    ("tokens", "ranks", "max_tokens"), [(8192, 1, 4096), (8192, 8, 512), (3, 1, 2), (1, 8, 1)]
)
def test_the_largest_batch_is_two_requests_of_each_rank(tokens: int, ranks: int, max_tokens: int) -> None:
    made = config({"expertd": {"url": "http://a"}})
    made.scheduler_config.max_num_batched_tokens = tokens
    made.parallel_config.tensor_parallel_size = ranks
    assert read_settings(made).max_tokens == max_tokens


def test_all_settings_are_read() -> None:
    given: dict[str, Any] = {
        "url": "http://a", "name": "b", "transport": "http", "max_tokens": 3, "retry_seconds": 0,
        "check_weights": "off",
    }  # fmt: skip
    assert read_settings(config({"expertd": given})) == PluginSettings(**given)


@pytest.mark.parametrize(
    ("additional", "text"),
    [
        (None, "expected the URL of a server, .* got None"),
        ({}, "expected the URL of a server, .* got {}"),
        ({"expertd": {}}, "expected the URL of a server"),
        ({"expertd": "http://a"}, "expected the URL of a server"),
        (
            {"expertd": {"url": "http://a", "max_token": 3}},
            "settings: expected url or name .*, got max_token",
        ),
    ],
)
def test_wrong_settings_are_refused(additional: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_settings(config(additional))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"compilation_config__cudagraph_mode": None},
        {"compilation_config__cudagraph_mode": CUDAGraphMode.NONE},
        {
            "compilation_config__cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
            "additional_config": {"expertd": {"url": "http://a", "transport": "device"}},
        },
        {"lora_config": SimpleNamespace(target_modules=["q_proj", "v_proj"])},
    ],
)
def test_what_works(changed: dict[str, Any]) -> None:
    check_config(config(**changed))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"compilation_config__cudagraph_mode": CUDAGraphMode.FULL}, "PIECEWISE .*, got FULL"),
        (
            {"compilation_config__cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY},
            "PIECEWISE .*, got FULL_DECODE_ONLY",
        ),
        (
            {"compilation_config__cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE},
            "PIECEWISE .*, got FULL_AND_PIECEWISE",
        ),
        ({"parallel_config__enable_eplb": True}, "enable_eplb: expected false, .* got True"),
        (
            {"parallel_config__prefill_context_parallel_size": 2},
            "prefill_context_parallel_size: expected 1, got 2",
        ),
        (
            {"lora_config": SimpleNamespace(target_modules=None)},
            "lora_target_modules: expected modules other than experts, got None",
        ),
        (
            {"lora_config": SimpleNamespace(target_modules=["q_proj", "experts"])},
            "other than experts, got .'q_proj', 'experts'",
        ),
    ],
)
def test_what_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_config(config(**changed))
