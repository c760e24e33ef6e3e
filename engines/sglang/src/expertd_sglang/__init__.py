"""An SGLang plugin: attention in SGLang, the routed experts of MoE layers on an expertd server.

A process with settings in the variable SGLANG_EXPERTD uses it; in any other it changes nothing.
"""

import os
import pkgutil


def register() -> None:
    """What SGLang calls in each of its processes (`sglang.srt.plugins`).

    Raises SystemExit for whatever is wrong: after any other exception SGLang would go on without the plugin,
    and load the experts itself.
    """
    if "SGLANG_EXPERTD" not in os.environ:
        return
    try:
        _register()
    except Exception as error:
        raise SystemExit(f"expertd-sglang: {error}") from error


def _register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from expertd_sglang import hooks
    from expertd_sglang.settings import read_settings

    read_settings("")
    for target, hook in hooks.AROUND.items():
        pkgutil.resolve_name(target)
        HookRegistry.register(target, hook, HookType.AROUND)
