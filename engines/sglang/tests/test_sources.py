"""The stubs are as SGLang's sources: SGLANG_SOURCES is a folder with its package, as its wheel unpacks to."""

import ast
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from expertd_sglang.__main__ import split
from expertd_sglang.hooks import AROUND
from tests import stubs

SOURCES = Path(os.environ.get("SGLANG_SOURCES", ""))
pytestmark = pytest.mark.skipif(
    not os.environ.get("SGLANG_SOURCES"), reason="SGLANG_SOURCES names no folder with SGLang's package"
)
OWN = Path(stubs.__file__)
HELPERS = {"FusedMoE.forward", "DefaultModelLoader.__init__"}  # of the tests


@cache
def definitions(path: Path) -> dict[str, Any]:
    """A file's functions and classes, and the functions in these, by qualified name."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef)
            }
    return found


def source_of(module: str) -> dict[str, Any]:
    return definitions(SOURCES.joinpath(*module.split(".")).with_suffix(".py"))


def shape(node: Any) -> Any:
    """Of a function its parameters, with whether they have defaults; of a class its fields."""
    if isinstance(node, ast.ClassDef):
        is_tuple = any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
        return [
            ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign) and is_tuple
        ]
    given = node.args
    names = [arg.arg for arg in [*given.posonlyargs, *given.args]]
    variable = [arg and arg.arg for arg in (given.vararg, given.kwarg)]
    keywords = [arg.arg for arg in given.kwonlyargs]
    return names, len(given.defaults), variable, keywords, [value is not None for value in given.kw_defaults]


@pytest.mark.parametrize("module", stubs.DEFINED)
def test_parameters_and_fields(module: str) -> None:
    names = {obj.__name__ for obj in stubs.DEFINED[module]}
    own = {name: node for name, node in definitions(OWN).items() if name.partition(".")[0] in names}
    theirs = source_of(module)
    for name in own.keys() - HELPERS:
        assert shape(own[name]) == shape(theirs[name]), name


def test_hooks_have_targets() -> None:
    for target in AROUND:
        known = [source_of(module) for module in stubs.DEFINED if target.startswith(f"{module}.")]
        assert any(target.endswith(f".{name}") for theirs in known for name in theirs), target


def fields() -> dict[str, set[str]]:
    """Names in SGLang's configuration, by the path of their class."""
    found: dict[str, set[str]] = {}
    for path in (SOURCES / "sglang/srt/arg_groups/fields").glob("*.py"):
        for node in definitions(path).values():
            texts = [ast.unparse(each) for each in node.body]
            for text in texts:
                if text.startswith("_NS_PATH = "):
                    names = {
                        ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)
                    }
                    found[ast.literal_eval(text.removeprefix("_NS_PATH = "))] = names
    return found


def test_the_configuration_has_the_fields() -> None:
    known = fields()
    for path, names in stubs.FIELDS.items():
        assert names.keys() <= known[path], path
    for flag in split("small", "http://a", [])[1]:
        name = flag.removeprefix("--").partition("=")[0].replace("-", "_")
        assert name in known["exec.graph"] | known["exec.moe"], flag
    flags = source_of("sglang.srt.runtime_context")["MoeFlags"].body
    assert "in_speculative_scope: bool = False" in [ast.unparse(each) for each in flags]
    backends = definitions(SOURCES / "sglang/srt/model_executor/cuda_graph_config.py")
    assert "DISABLED = 'disabled'" in [ast.unparse(each) for each in backends["Backend"].body]


def test_a_layer_and_a_rank_have_the_attributes() -> None:
    layer = ast.unparse(source_of("sglang.srt.layers.moe.fused_moe_triton.layer")["FusedMoE.__init__"])
    context = (SOURCES / "sglang/srt/runtime_context.py").read_text()
    for name in ("moe_tp_rank", "moe_tp_size"):
        assert f"self.{name} = get_parallel().{name}" in layer
    for name in stubs.PARALLEL:
        assert f'"{name}"' in context, name
