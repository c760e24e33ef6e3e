"""`expertd-sglang serve MODEL --expertd URL [flags of SGLang]`: `sglang serve`, with the plugin."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from expertd_client.engine import command_parser, expect, make_settings

_NAMED, _NUMBERS = "--expertd.", ("max_tokens", "retry_seconds")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ends with SGLang's exit code."""
    epilog = "--expertd.NAME=VALUE is a setting more. All other flags are those of `sglang serve`."
    parser = command_parser("expertd-sglang", "SGLang", epilog)
    given, others = parser.parse_known_args(arguments)
    first = (sys.argv[1:] if arguments is None else arguments)[1]
    try:
        expect(first == given.model, "serve", "MODEL right behind it", first)  # or it may be a flag's value
        settings, flags = split(given.model, given.expertd, others)
        plugins = os.environ.get("SGLANG_PLUGINS") or "expertd"
        expect(
            "expertd" in map(str.strip, plugins.split(",")), "SGLANG_PLUGINS", "expertd among them", plugins
        )
    except ValueError as error:
        parser.exit(2, f"expertd-sglang: {error}\n")
    from sglang.cli.main import main as sglang

    os.environ["SGLANG_EXPERTD"] = json.dumps(settings)  # which SGLang's other processes inherit
    sys.argv = ["sglang", "serve", given.model, *flags]
    sglang()


def split(model: str, url: str, others: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The plugin's settings, and SGLang's flags, whose last one of a name counts. Raises ValueError."""
    settings: dict[str, Any] = {"url": url}
    for flag in others:
        if flag.startswith(_NAMED):
            name, _, value = flag.removeprefix(_NAMED).partition("=")
            settings[name] = _number(value) if name in _NUMBERS else value
    checked = make_settings(settings, model)
    flags = ["--disable-shared-experts-fusion", "--cuda-graph-backend-prefill=disabled"]
    if checked.transport != "device":
        flags.append("--cuda-graph-backend-decode=disabled")
    return settings, [*flags, *(flag for flag in others if not flag.startswith(_NAMED))]


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # to be refused


if __name__ == "__main__":
    main()
