"""The code blocks of the documents, and what an invisible comment right above each says of it.

| comment | the block |
|---|---|
| `<!-- run -->` | is run by tests/test_blocks.py: sh, or python |
| `<!-- run: alone -->` | the same, while no other test runs: what it prints depends on times |
| `<!-- run: output -->` | is what the block before it prints |
| `<!-- part of FILE -->` | is a part of that file |
| `<!-- check -->` | has commands `expertd serve`, whose arguments are given to `expertd check` |
| `<!-- tested by FILE::TEST -->` | is run, or compared, by that test |
| `<!-- not run: REASON -->` | is not run |

A block of yaml needs none: tests/test_documents.py reads all of them as settings.
"""

import re
from dataclasses import dataclass

from deploy.documentation import pages
from tests.paths import ROOT

_BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """`line`: of its first fence; `says`: its comment, or ""; `language`: "" if it has none."""

    document: str
    line: int
    language: str
    says: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks() -> list[Block]:
    """All code blocks of the documents that are pages, in their order."""
    return [block for document in sorted(pages()) for block in blocks_of(document)]


def blocks_of(document: str) -> list[Block]:
    """The code blocks of one document."""
    text = (ROOT / document).read_text()
    return [
        Block(document, text.count("\n", 0, found.start(2)) + 1, found[2], found[1] or "", found[3])
        for found in _BLOCK.finditer(text)
    ]
