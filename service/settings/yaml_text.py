"""Parses YAML, with the line of every key. Refuses duplicate keys, and aliases that stand for very much."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from expertd.service.settings.values import Key

_ONE_DOCUMENT = "expected a single document in the stream"  # PyYAML's words
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"
_MAX_DEPTH = 64
_MAX_VALUES = 20_000  # several hundred models; aliases of aliases stand for billions in a few lines
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


class TooManyValuesError(YamlTextError):
    """Valid YAML with more values than are looked at; the text shows none of them."""


def parse(text: str, fast: bool = False) -> Parsed:
    """Parse a YAML (or JSON) document.

    Raises YamlTextError for invalid YAML and duplicate keys, and TooManyValuesError, which is one, for
    more than 20,000 values, each counted wherever an alias repeats it.

    fast  by libyaml, where PyYAML has it: a tenth of the time, with less helpful texts of errors
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if fast else yaml.SafeLoader
    try:
        if fast:
            _check_depth(text, loader)
        node = yaml.compose(text, Loader=loader)
        if node is not None:
            _count_values(node, {})
        lines: dict[Key, int] = {} if node is None else dict(_lines(node, ()))
        return Parsed(yaml.load(text, Loader=loader), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        if error.context == _ONE_DOCUMENT:
            raise YamlTextError("expected one document, got another one", line) from error
        problem = " ".join(f"{error.problem}".split())
        raise YamlTextError(f"expected YAML, got {problem:.200}", line) from error
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


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """The values of `node`, without its keys. Raises TooManyValuesError, with the line of the first excess.

    counts  those of the nodes that are known already: an alias is not followed again
    """
    if node not in counts:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        counts[node] = 1 + sum(_count_values(value, counts) for value in inner)
        if counts[node] > _MAX_VALUES:
            expected = f"expected at most {_MAX_VALUES} values, also where aliases repeat them"
            raise TooManyValuesError(f"{expected}, got more", node.start_mark.line + 1)
    return counts[node]


def _text(name: yaml.ScalarNode) -> str:
    """A mapping's key as a `Key` has it: that of a value other than text, such as true, is Python's."""
    return str(name.value if name.tag == _TEXT else yaml.SafeLoader("").construct_object(name))


def _lines(node: yaml.Node, key: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[tuple[str, str], int] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode) or name.tag == _MERGE:
                continue
            within, line = (*key, _text(name)), name.start_mark.line + 1
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
