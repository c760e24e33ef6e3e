"""A kernel variant as one text: definitions, then the file with its headers inlined."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CSRC = Path(__file__).parent.parent / "csrc"
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
_ONCE = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+once\b")


@dataclass(frozen=True)
class Source:
    """A file in kernels/csrc and its macro definitions: one variant of a kernel."""

    name: str
    file: str
    entry: str
    defines: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The text to compile: the file with every header inlined once, so that it needs no include path.

        Line directives preserve file names and line numbers for messages and profiles.
        Raises FileNotFoundError for a file that is not in kernels/csrc.
        """
        lines = [f"#define {name} {value}" for name, value in self.defines]
        self._append(lines, self.file, set())
        return "\n".join([*lines, ""])

    def _append(self, lines: list[str], file: str, seen: set[str]) -> None:
        seen.add(file)
        lines.append(_line(1, file))
        for number, line in enumerate((CSRC / file).read_text().splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include is None:
                lines.append("" if _ONCE.match(line) else line)
            elif include[1] in seen:
                lines.append("")
            else:
                self._append(lines, include[1], seen)
                lines.append(_line(number + 1, file))


class Variant(NamedTuple):
    """How to compile and launch a kernel.

    source        the file to compile, with its definitions
    threads       threads per CTA
    shared_bytes  dynamic shared memory per CTA, by the number of groups, or of experts
    """

    source: Source
    threads: int
    shared_bytes: Callable[[int], int]


def _line(number: int, file: str) -> str:
    return f'#line {number} "kernels/csrc/{file}"'
