"""What somebody who names a wrong directory probably meant."""

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


ORIGINAL = "serve the checkpoint that it was made from"


def gguf_files(directory: Path) -> list[Path]:
    """The files of llama.cpp's format in a directory, or one level below."""
    return sorted(file for pattern in ("*.gguf", "*/*.gguf") for file in directory.glob(pattern))


def hint_of(directory: Path) -> str | None:
    """What was expected instead of `directory`, if that is recognized; None: nothing is wrong so far."""
    if not directory.is_absolute() and _HUB_ID.fullmatch(str(directory)) and not directory.exists():
        return (
            f"expected a directory with a checkpoint, got none with that name; for a model "
            f"on the Hugging Face hub: hf download {directory} --local-dir {directory}"
        )
    try:
        if (directory / "config.json").exists():
            return None
        if found := [directory] if directory.suffix == ".gguf" else gguf_files(directory):
            return f"expected config.json and safetensors files, got GGUF ({found[0].name}); {ORIGINAL}"
        snapshots = sorted(directory.glob("snapshots/*/config.json"))
    except OSError:
        return None  # whoever reads config.json says so
    if not snapshots:
        return None
    return f"expected a snapshot in the hub's cache, got the model's directory; try {snapshots[-1].parent}"
