"""Prints what a server consists of, as CycloneDX JSON: `python -m requirements.sbom cpu` (or `cuda`).

Our client, and from the lock files: names, versions and hashes of every package in them, also of those that
only some platforms need. Uses only the standard library.
"""

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
_FILES = {"cpu": ("torch-cpu.txt", "cpu.txt"), "cuda": ("cuda.txt",)}
_PACKAGE = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)((?:[^\n]*\\\n)*[^\n]*)", re.M)


def bill(variant: str) -> dict[str, Any]:
    """The bill of materials of a server on a CPU ("cpu") or on NVIDIA GPUs ("cuda")."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    ours = "\n".join(project["dependencies"])  # which pin nothing else
    texts = [ours, *((FOLDER / name).read_text() for name in _FILES[variant])]
    found = (match for text in texts for match in _PACKAGE.finditer(text))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", **_about(project["name"], project["version"])}},
        "components": [
            {"type": "library", **_about(name, version), **_hashes(rest)}
            for name, version, rest in (match.groups() for match in found)
        ],
    }


def _about(name: str, version: str) -> dict[str, str]:
    purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version.replace('+', '%2B')}"
    return {"bom-ref": purl, "name": name, "version": version, "purl": purl}


def _hashes(lines: str) -> dict[str, list[dict[str, str]]]:
    """Of every file of the package: each platform has its own."""
    found = re.findall(r"--hash=sha256:([0-9a-f]{64})", lines)
    return {"hashes": [{"alg": "SHA-256", "content": each} for each in found]} if found else {}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what a server consists of, as CycloneDX JSON.")
    parser.add_argument("variant", choices=_FILES)
    json.dump(bill(parser.parse_args().variant), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
