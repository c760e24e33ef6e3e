"""Writes the figures in the documents: `python -m benchmarks.report [--check] [--pictures]`.

The text in a document between `<!-- report:NAME -->` and `<!-- /report -->` is a section of gemm/report.py or
of another package's, made from benchmarks/results. --check writes nothing, and fails if a document
has other figures or a picture was drawn from another result; --pictures draws the pictures too.
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import pictures
from benchmarks.engines import report as engines
from benchmarks.engines import when_it_pays
from benchmarks.gemm import report as gemm
from benchmarks.layer import report as layer
from benchmarks.lib.markdown import NOT_MEASURED, measured
from benchmarks.ranks import report as ranks
from benchmarks.serving import report as serving

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "docs/results.md",
    "docs/numerics.md",
    "docs/expert-store.md",
    "docs/pool.md",
    "docs/rdma.md",
    "docs/when-it-pays.md",
    "docs/internals/benchmarks.md",
    "docs/internals/benchmarks-gemm.md",
    "docs/internals/benchmarks-parallel.md",
    "docs/internals/benchmarks-serving.md",
    "docs/internals/benchmarks-load.md",
)


def headline(results: Path) -> str:
    """What an engine gets, once that is measured, then what a layer does."""
    texts = [measured(section)(results) for section in (engines.headline, layer.headline)]
    return "\n\n".join(text for text in texts if text != NOT_MEASURED) or NOT_MEASURED


SECTIONS = {
    name: measured(section)
    for package in (layer, gemm, serving, ranks, when_it_pays, engines)
    for name, section in package.SECTIONS.items()
} | {"headline": headline}
"""What writes them, by the name in the documents' markers."""
_OPEN, _CLOSE = "<!-- report:", "<!-- /report -->"
_SECTION = re.compile(rf"({_OPEN}([\w-]+) -->\n).*?({_CLOSE})", re.S)


def render(text: str, results: Path = RESULTS) -> str:
    """`text` with every section rewritten from the results. Raises ValueError for unmatched markers."""
    names = [name for _, name, _ in _SECTION.findall(text)]
    if not len(names) == text.count(_OPEN) == text.count(_CLOSE):
        raise ValueError(f"report markers: expected {_OPEN}NAME --> and {_CLOSE} in turn, got others")
    if unknown := set(names) - SECTIONS.keys():
        raise ValueError(f"report section: expected one of {', '.join(SECTIONS)}, got {min(unknown)!r}")
    return _SECTION.sub(lambda found: f"{found[1]}{SECTIONS[found[2]](results)}\n{found[3]}", text)


def stale(root: Path = ROOT) -> list[str]:
    """The documents and pictures that do not match the results."""
    results = root / "benchmarks" / "results"
    documents = [name for name in DOCUMENTS if (text := (root / name).read_text()) != render(text, results)]
    drawn = [
        name
        for name, (result, _) in pictures.measured(results).items()
        if pictures.digest(results / result) not in (root / name).read_text()
    ]
    return documents + drawn


def main() -> None:
    """Write the documents, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything differs")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures too")
    options = parser.parse_args()
    if options.check:
        if found := stale():
            sys.exit(f"benchmarks.report: run it (with --pictures for pictures): {', '.join(found)}")
        return
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(render(path.read_text()))
    if options.pictures:
        for name, (result, draw) in pictures.measured(RESULTS).items():
            draw(RESULTS / result, ROOT / name)


if __name__ == "__main__":
    main()
