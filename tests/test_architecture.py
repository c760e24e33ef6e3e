"""Imports point one way: each part of the code imports only the parts below it, without cycles."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from expertd.backends import BACKENDS
from tests.paths import ROOT

SERVICE = "expertd.service"
# each package of the service, and the packages that it may import besides itself and util
PACKAGES = {
    "memory": (),
    "device": ("memory",),
    "moe": ("device", "memory"),
    "settings": ("moe",),
    "checkpoints": ("device", "moe", "settings"),
    "engine": ("device", "memory", "moe", "settings", "checkpoints"),
    "inference": ("memory", "moe", "settings", "engine", "tracing"),
    "tracing": ("moe", "settings", "engine"),
    "channels": ("memory", "moe", "settings", "engine", "statuses"),
    "http": ("memory", "moe", "settings", "engine", "inference", "statuses", "channels", "tracing"),
    "ranks": ("device", "memory", "moe", "settings", "engine"),
    "grpc": ("memory", "moe", "settings", "engine", "http", "inference", "statuses", "tracing"),
    "commands": (
        "device",
        "moe",
        "settings",
        "checkpoints",
        "engine",
        "channels",
        "http",
        "grpc",
        "tracing",
        "ranks",
    ),
    "cli": ("commands",),
    "statuses": ("engine",),
    "util": (),
}
TORCH_FREE = (
    "expertd.backends",
    "expertd.cpus",
    "expertd.limits",
    "expertd.routing",
    "expertd.service.channels.channel",
    "expertd.service.channels.geometry",
    "expertd.service.checkpoints",
    "expertd.service.checkpoints.expand",
    "expertd.service.cli",
    "expertd.service.engine.executor",
    "expertd.service.engine.metrics",
    "expertd.service.http.protocol",
    "expertd.service.http.worker",
    "expertd.service.inference.request",
    "expertd.service.memory",
    "expertd.service.moe.placement",
    "expertd.service.moe.request",
    "expertd.service.moe.shape",
    "expertd.service.moe.tensor_file",
    "expertd.service.moe.weights_file",
    "expertd.service.settings.loader",
)
READ_THE_ENVIRONMENT = {
    "kernels/jit/cache.py",
    "service/commands/cpus.py",
    "service/util/heap.py",
    "service/settings/sources.py",
}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[1:] if parts[0] == "src" else ("expertd", *parts))
    return name.removesuffix(".__init__")


FILES = {
    _module(path): path
    for path in (
        *(ROOT / "src" / "expertd").glob("*.py"),
        *(ROOT / "kernels").rglob("*.py"),
        *(ROOT / "service").rglob("*.py"),
    )
}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _trees() -> dict[str, ast.Module]:
    """By module; read by tests, not by every process that collects them."""
    return {module: _tree(path) for module, path in FILES.items()}


@cache
def _imports(tree: ast.Module, for_checkers: bool = False) -> tuple[str, ...]:
    """Modules that a tree imports at run time; those for type checkers count with `for_checkers`."""
    return tuple(_imported(tree, for_checkers))


def _imported(node: ast.AST, for_checkers: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not for_checkers and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"expected absolute imports, got {ast.unparse(child)}"
            of = child.module or ""
            # A name may be a module of the package, or an object in it.
            yield from (name if (name := f"{of}.{alias.name}") in FILES else of for alias in child.names)
        elif not isinstance(child, ast.expr):  # which has no statements
            yield from _imported(child, for_checkers)


def _package(module: str) -> str:
    return module.removeprefix(f"{SERVICE}.").split(".")[0]


WEB, GRPC = ("fastapi", "starlette", "uvicorn", "httptools", "h11"), ("grpc", "google")


@pytest.mark.parametrize(
    ("within", "beside", "foreign"),
    [
        ("expertd", None, ("kernels", "service", "benchmarks", "examples", "tests")),
        ("expertd.kernels", None, (SERVICE, "expertd_client", "pydantic", "yaml", "prometheus_client")),
        ("expertd", f"{SERVICE}.http", WEB),
        ("expertd", f"{SERVICE}.grpc", GRPC),
        (f"{SERVICE}.http", None, ("expertd.kernels",)),
        ("expertd.kernels.backends.hopper", None, ("expertd.kernels.backends.triton",)),
        ("expertd.kernels.backends.triton", None, ("expertd.kernels.backends.hopper",)),
    ],
)
def test_what_may_not_be_imported(within: str, beside: str | None, foreign: tuple[str, ...]) -> None:
    for module, tree in _trees().items():
        if module.startswith(within) and not (beside and module.startswith(beside)):
            names = list(_imports(tree))
            found = [n for n in names if any(n == each or n.startswith(f"{each}.") for each in foreign)]
            assert not found, module


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_of_the_service_import_only_those_below(package: str) -> None:
    allowed = {package, "util", *PACKAGES[package]}
    modules = [module for module in FILES if module.startswith(f"{SERVICE}.") and _package(module) == package]
    assert modules
    for module in modules:
        names = [name for name in _imports(_tree(FILES[module])) if name.startswith(SERVICE)]
        assert {_package(name) for name in names} <= allowed, module


def test_the_server_uses_of_the_client_what_they_share() -> None:
    """A channel's protocol and its caller's side, and the client's commands."""
    shared = {f"expertd_client.channel.{name}" for name in ("claiming", "fence", "layout", "link")}
    for module, tree in _trees().items():
        allowed = {"expertd_client.__main__"} if module == f"{SERVICE}.commands.client" else shared
        names = _imports(tree, for_checkers=True)
        assert {name for name in names if name.startswith("expertd_client")} <= allowed, module


def test_nothing_but_a_backend_or_a_device_assumes_a_gpu() -> None:
    """Others ask `Capabilities` and `service.device`, so that a further backend or device is one folder."""
    for module, tree in _trees().items():
        backends = (f"expertd.kernels.backends.{name}" for name, can in BACKENDS.items() if can.on_gpu)
        if module.startswith((f"{SERVICE}.device", "expertd.backends", *backends)):
            continue
        found = [node for node in ast.walk(tree) if _names_a_backend(node)]
        if module.startswith(SERVICE):
            found += [node for node in ast.walk(tree) if _is_of_cuda(node)]
            names = list(_imports(tree))
            assert not [name for name in names if name.startswith(("cuda.core", "cuda.bindings"))], module
        assert not [ast.unparse(node) for node in found], module


def _names_a_backend(node: ast.AST) -> bool:
    is_name = isinstance(node, ast.Constant) and node.value == "hopper"
    return is_name or (isinstance(node, ast.Attribute) and node.attr == "is_cuda")


def _is_of_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(isinstance(each, ast.Constant) and each.value == "cuda" for each in node.comparators)
    if not isinstance(node, ast.Attribute) or node.attr not in ("cuda", "_C"):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "torch"


def test_imports_have_no_cycles() -> None:
    graph = {
        module: {name for name in _imports(tree, for_checkers=True) if name in FILES and name != module}
        for module, tree in _trees().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_two_classes_have_one_name() -> None:
    """Not in the client and the plugins either: whoever reads a name should not ask whose it is."""
    others = ("client/src", "engines/vllm/src", "engines/sglang/src")
    paths = (*FILES.values(), *(path for folder in others for path in (ROOT / folder).rglob("*.py")))
    found: dict[str, list[str]] = {}
    for path in paths:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_modules_that_run_before_torch_do_not_import_it() -> None:
    code = f"import sys\nfor name in {TORCH_FREE}: __import__(name); assert 'torch' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_only_the_loader_and_three_others_read_the_environment() -> None:
    readers = {
        str(FILES[module].relative_to(ROOT))
        for module, tree in _trees().items()
        if any(
            getattr(node, "attr", getattr(node, "id", "")).endswith(("environ", "getenv"))
            for node in ast.walk(tree)
            if isinstance(node, (ast.Attribute, ast.Name))
        )
    }
    assert readers == READ_THE_ENVIRONMENT


def test_only_two_modules_write_temporary_files() -> None:
    """All others would have to report a folder that is full or cannot be written to."""
    users = {
        str(FILES[module].relative_to(ROOT))
        for module, tree in _trees().items()
        if "tempfile" in _imports(tree)
    }
    assert users == {"kernels/jit/cache.py", "service/util/files.py"}


def test_tests_and_benchmarks_do_not_import_each_other() -> None:
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        other = "benchmarks" if name.startswith("tests/") else "tests"
        of_benchmarks = name.startswith("tests/benchmarks/") or name == "tests/test_make_checkpoint.py"
        if of_benchmarks or other not in path.read_text():  # most, and quick to tell
            continue
        assert other not in {used.split(".")[0] for used in _imports(_tree(path))}, name


def test_examples_use_the_server_through_its_client() -> None:
    users = set()
    for path in (ROOT / "examples").rglob("*.py"):
        tops = {used.split(".")[0] for used in _imports(_tree(path))}
        assert not tops & {"benchmarks", "tests"}, path.name
        if "expertd" in tops:
            users.add(path.name)
    assert users == {"in_process.py"}


def test_the_document_has_the_same_packages() -> None:
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\|$", text, re.M)
    assert {package: set(re.findall(r"`(\w+)`", allowed)) for package, allowed in rows} == {
        package: set(allowed) for package, allowed in PACKAGES.items()
    }


FORBIDDEN = (
    "expertd_client",
    "fastapi",
    "pydantic",
    "yaml",
    "prometheus_client",
    "uvicorn",
    "expertd.service",
)


def test_importing_kernels_loads_nothing_of_the_service_and_needs_no_cuda_extra() -> None:
    code = (
        "import sys; sys.modules['cuda.core'] = None; import expertd.kernels, expertd.kernels.partitions\n"
        f"print([name for name in {FORBIDDEN} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
