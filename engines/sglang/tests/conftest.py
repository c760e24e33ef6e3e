"""The stubs in SGLang's place, and the plugin with its hooks applied."""

from typing import Any

import pytest

from tests import stubs

stubs.install()

URL = "http://127.0.0.1:9"  # nobody listens there


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration and classes as SGLang has them, before and after each test."""
    loading = __import__("sglang.srt.model_loader.weight_utils", fromlist=["*"])
    owners: list[tuple[Any, str]] = [
        (stubs.FusedMoE, "__init__"),
        (stubs.DefaultModelLoader, "_get_all_weights"),
        (loading, "safetensors_weights_iterator"),
        (loading, "buffered_multi_thread_safetensors_weights_iterator"),
    ]
    for owner, name in owners:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    stubs.reset()
    stubs.HookRegistry.hooks.clear()
    monkeypatch.delenv("SGLANG_EXPERTD", raising=False)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang loads it, in a process with settings."""
    use(monkeypatch, f'{{"url": "{URL}"}}')


def use(monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    """Load the plugin with these."""
    from expertd_sglang import register

    monkeypatch.setenv("SGLANG_EXPERTD", settings)
    register()
    stubs.HookRegistry.apply_hooks()
