"""The bill of materials has what the lock files have."""

import json
import re
import subprocess
import sys

import pytest

from requirements import lock
from tests.test_lock import locked

FILES = {"cpu": ("torch-cpu.txt", "cpu.txt"), "cuda": ("cuda.txt",)}


@pytest.mark.parametrize("variant", FILES)
def test_it_has_every_package_with_its_hashes(variant: str) -> None:
    command = [sys.executable, "-m", "requirements.sbom", variant]
    done = subprocess.run(command, cwd=lock.ROOT, capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "expertd")
    expected = {
        (requirement.name, str(requirement.specifier).removeprefix("=="))
        for name in FILES[variant]
        for requirement in locked(name)
    }
    assert {(each["name"], each["version"]) for each in bill["components"]} == expected
    texts = [(lock.ROOT / "requirements" / name).read_text() for name in FILES[variant]]
    listed = {digest for text in texts for digest in re.findall(r"sha256:([0-9a-f]{64})", text)}
    hashes = {digest["content"] for each in bill["components"] for digest in each.get("hashes", ())}
    assert hashes == listed
    names = [each["bom-ref"] for each in bill["components"]]
    assert len(names) == len(set(names))
