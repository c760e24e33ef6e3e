"""Files of API keys for tests; the key of each name is known."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import yaml


def key_of(name: str) -> str:
    """The key that belongs to a name."""
    return f"secret-of-{name}"


def bearer(name: str) -> dict[str, str]:
    """The header that sends a name's key."""
    return {"Authorization": f"Bearer {key_of(name)}"}


def write_keys(path: Path, **rights: Sequence[str]) -> Path:
    """Replace a file of keys by one with these names and their rights, as an editor or Kubernetes does."""
    entries = [
        {"name": name, "sha256": sha256(key_of(name).encode()).hexdigest(), "rights": list(given)}
        for name, given in rights.items()
    ]
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(entries))
    new.replace(path)
    return path


def all_keys(path: Path) -> Path:
    """A file with a key for each right, named like it."""
    return write_keys(path, infer=["infer"], admin=["admin"], metrics=["metrics"])
