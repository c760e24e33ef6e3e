"""Draws docs/pictures/*.dot as SVG: `python -m deploy.diagrams`, with Graphviz (Debian's package graphviz).

Each picture has the digest of its source, so that a test without Graphviz notices an old one. Colors follow
the reader's color scheme, and the picture has a background of its own, so it can be read on any page.
"""

import hashlib
import re
import subprocess
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_STYLE = """
.graph > polygon { fill: #ffffff }
.cluster path { fill: #f3f6fa; stroke: #c3ccd6 }
.node path { fill: #ffffff; stroke: #4c6a92 }
.edge path { stroke: #59636e }
.edge polygon { fill: #59636e; stroke: #59636e }
text { fill: #1f2328 }
@media (prefers-color-scheme: dark) {
  .graph > polygon { fill: #0d1117 }
  .cluster path { fill: #161d27; stroke: #39424e }
  .node path { fill: #1f2a38; stroke: #7ba4d9 }
  .edge path { stroke: #9aa4b0 }
  .edge polygon { fill: #9aa4b0; stroke: #9aa4b0 }
  text { fill: #e6edf3 }
}
"""
_DEFAULTS = {
    "graph": 'fontname="sans-serif" fontsize=13 style=rounded labeljust=l pad=0.2',
    "node": 'fontname="sans-serif" fontsize=12 shape=box style=rounded margin="0.15,0.08"',
    "edge": 'fontname="sans-serif" fontsize=11 arrowsize=0.7',
}


def digest(source: Path) -> str:
    """What a picture of `source` has in its first comment."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def drawn(source: Path) -> str:
    """The SVG of a dot file."""
    options = [f"-{kind[0].upper()}{option}" for kind, text in _DEFAULTS.items() for option in _options(text)]
    command = ["dot", "-Tsvg", *options, str(source)]
    svg = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    svg = re.sub(r"<!--.*?-->\n?|<\?xml.*?\?>\n?|<!DOCTYPE.*?>\n?|<title>.*?</title>\n?", "", svg, flags=re.S)
    svg = re.sub(r"(<svg[^>]*>)", rf"\1\n<style>{_STYLE}</style>", svg, count=1)
    return f"<!-- {source.name}: {digest(source)} -->\n{svg}"


def _options(text: str) -> list[str]:
    return [f"{name}={value.strip(chr(34))}" for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', text)]


def main() -> None:
    """Draw all pictures."""
    for source in sorted(PICTURES.glob("*.dot")):
        source.with_suffix(".svg").write_text(drawn(source))


if __name__ == "__main__":
    main()
