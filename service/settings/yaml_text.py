"""Parses YAML, with the line of every key, and refuses duplicate keys."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from expertd.service.settings.values import Key

_MERGE = "tag:yaml.org,2002:merge"
_MAX_DEPTH = 64
_BEGINS = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_ENDS = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


class Parsed(NamedTuple):
    """A value, and the line (from 1) on which each of its parts begins."""

    value: Any
    lines: dict[Key, int]


class YamlTextError(Exception):
    """Invalid YAML, at `key` and, if known, on line `line` (from 1).

    Not a ValueError: pydantic-settings would wrap it, or keep the text undecoded.
    """

    def __init__(self, text: str, line: int | None = None, key: Key = ()) -> None:
        super().__init__(text)
        self.line = line
        self.key = key


def parse(text: str, fast: bool = False) -> Parsed:
    """Parse a YAML (or JSON) document. Raises YamlTextError for invalid YAML and duplicate keys.

    fast  by libyaml, where PyYAML has it: a tenth of the time, with less helpful texts of errors
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if fast else yaml.SafeLoader
    try:
        if fast:
            _check_depth(text, loader)
        node = yaml.compose(text, Loader=loader)
        lines: dict[Key, int] = {} if node is None else dict(_lines(node, ()))
        return Parsed(yaml.load(text, Loader=loader), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = " ".join(f"{error.problem}".split())
        raise YamlTextError(f"expected YAML, got {problem:.200}", mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise YamlTextError("expected YAML, got values nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise YamlTextError(f"expected YAML, got {problem:.200}") from error


def _check_depth(text: str, loader: type[yaml.SafeLoader]) -> None:
    """Raise RecursionError where libyaml's composer would exhaust the stack, and end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, _BEGINS) - isinstance(event, _ENDS)
        if depth > _MAX_DEPTH:
            raise RecursionError


def _lines(node: yaml.Node, key: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[tuple[str, str], int] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode) or name.tag == _MERGE:
                continue
            within, line = (*key, str(name.value)), name.start_mark.line + 1
            if (first := seen.get((name.tag, name.value))) is not None:
                raise YamlTextError(f"expected once, got twice (first on line {first})", line, within)
            seen[name.tag, name.value] = line
            yield within, line
            yield from _lines(value, within)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            within = (*key, str(number))
            yield within, value.start_mark.line + 1
            yield from _lines(value, within)
