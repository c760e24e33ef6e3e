"""What SGLang's layers need before they run: its packages, and the options of a server."""

from functools import cache
from importlib.metadata import version as version_of
from importlib.util import find_spec
from types import SimpleNamespace


def available() -> bool:
    """Whether sglang and sglang-kernel are installed."""
    return all(find_spec(name) is not None for name in ("sglang", "sgl_kernel"))


def version() -> str:
    """The versions of both packages."""
    return f"sglang {version_of('sglang')}, sglang-kernel {version_of('sglang-kernel')}"


@cache
def set_up() -> None:
    """Give SGLang the server options that its layers read, with their default values."""
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    options = SimpleNamespace(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
    set_global_server_args_for_scheduler(options)
