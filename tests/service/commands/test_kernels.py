"""`expertd kernels`, run as a command and without a GPU."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertd.kernels import jit
from expertd.kernels.backends.hopper import variants
from expertd.service.cli import main
from tests.service.full import break_temporary_files

VARIANTS = variants.VARIANTS[:2]  # tests/kernels compiles them all
NAMES = [variant.source.name for variant in VARIANTS]


@pytest.fixture(scope="module", autouse=True)
def few_variants() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(variants, "VARIANTS", VARIANTS)
        yield


@dataclass(frozen=True)
class Built:
    """A cache with all of these variants, and what the command that has filled it said."""

    cache: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def built(few_variants: None, tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory, out = tmp_path_factory.mktemp("full"), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out):
        patched.setenv(jit.CACHE_DIR_VARIABLE, str(directory))
        assert main(["kernels", "--build", "--json"]) == 0
    return Built(directory, json.loads(out.getvalue()))


@pytest.fixture
def full_cache(built: Built) -> Path:
    return built.cache


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(tmp_path / "empty"))
    return tmp_path / "empty"


@pytest.fixture
def use_full_cache(full_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(full_cache))


def test_listing_compiles_nothing(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = jit.stats()
    assert main(["kernels"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == NAMES
    assert out.count("not compiled") == len(NAMES)
    assert f"cache: {empty_cache};" in out
    assert jit.stats() == before
    assert not empty_cache.exists()


@pytest.mark.usefixtures("use_full_cache")
@pytest.mark.thorough
def test_the_table_lists_each_variants_resources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 0
    for (source, _, shared_bytes), line in zip(
        VARIANTS, capsys.readouterr().out.splitlines()[1:], strict=False
    ):
        binary = jit.build(source)
        name, registers, shared, stack, spills, seconds, unit, state = line.split()
        assert name == source.name
        assert (int(registers), int(stack), int(spills)) == (binary.usage.registers, 0, 0)
        assert int(shared) == shared_bytes(256)
        assert (float(seconds), unit, state) == (round(binary.seconds, 2), "s", "cached")


@pytest.mark.usefixtures("use_full_cache")
@pytest.mark.slow
def test_build_fills_the_cache_and_prints_the_time(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    report = built.report
    assert report["build"]["compiled"] == len(NAMES)
    assert report["build"]["from_cache"] == len(NAMES)
    assert report["build"]["seconds"] > report["build"]["from_cache_seconds"] > 0
    assert [row["name"] for row in report["variants"]] == NAMES
    assert all(row["cached"] and row["compile_seconds"] > 0 for row in report["variants"])
    assert main(["kernels", "--build"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "(0 compiled), then 6 of 6 from the cache in".replace("6", str(len(NAMES))) in last


@pytest.mark.usefixtures("use_full_cache")
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("source", b'#line 1 "kernels/csrc/grouped_gemm.cu"'),
        pytest.param("ptx", b".visible .entry grouped_gemm(", marks=pytest.mark.thorough),
        pytest.param("sass", b"QGMMA", marks=pytest.mark.thorough),
        ("cubin", b"\x7fELF"),
    ],
)
def test_dump(form: str, expected: bytes, tmp_path: Path) -> None:
    file = tmp_path / form
    assert main(["kernels", "--dump", NAMES[0], "--format", form, "-o", str(file)]) == 0
    assert expected in file.read_bytes()


def test_a_dumped_source_compiles_alone(
    use_full_cache: None, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["kernels", "--dump", NAMES[0]]) == 0
    text = capfdbinary.readouterr().out.decode()
    assert "#include" not in text
    variant = VARIANTS[0].source
    cubin = jit.build(variant).cubin
    assert jit.compile_source(variant, text).cubin == cubin
    assert main(["kernels", "--dump", NAMES[0], "--format", "cubin"]) == 0
    assert capfdbinary.readouterr().out == cubin


@pytest.mark.usefixtures("empty_cache")
def test_a_bundle_has_binaries_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "built"
    monkeypatch.setattr(jit, "BUNDLE", bundle)
    monkeypatch.setattr("expertd.kernels.jit.cache.BUNDLE", bundle)
    monkeypatch.setattr(variants, "VARIANTS", VARIANTS[-1:])
    assert main(["kernels", "--build", "--bundle", "--arch", "sm_90a"]) == 0
    assert [path.suffix for path in bundle.iterdir()] == [".bin"]
    assert jit.build(VARIANTS[-1].source).cached


@pytest.mark.usefixtures("empty_cache")
def test_a_bundle_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(jit, "BUNDLE", tmp_path / "file" / "built")
    monkeypatch.setattr(variants, "VARIANTS", VARIANTS[-1:])
    assert main(["kernels", "--build", "--bundle"]) == 2
    assert f"bundle: expected to write to {tmp_path}/file/built" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found before anything is compiled."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(tmp_path / "file" / "cache"))
    before = jit.stats()
    assert main(["kernels", "--build"]) == 2
    text = (
        f"kernel cache: expected a folder that can be written to, got {tmp_path}/file/cache: Not a directory"
    )
    assert capsys.readouterr() == ("", f"expertd kernels: {text}\n")
    assert jit.stats() == before


@pytest.mark.usefixtures("use_full_cache")
def test_a_disassembly_needs_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = break_temporary_files(monkeypatch, "a file", tmp_path)
    assert main(["kernels", "--dump", NAMES[0], "--format", "sass"]) == 2
    expected = "--format sass: expected a folder for temporary files (TMPDIR) that can be written to"
    assert capsys.readouterr().err == f"expertd kernels: {expected}, got {tried}: Not a directory\n"


def test_without_a_home_the_cache_needs_a_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (jit.CACHE_DIR_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert main(["kernels"]) == 2
    text = f"expertd kernels: {jit.CACHE_DIR_VARIABLE}: expected a directory, got neither it nor a home\n"
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--build", "--arch", "sm_80"], "arch: expected sm_90a, got 'sm_80'"),
        (["--bundle"], "bundle: expected --build with it, got none"),
        (["-o", "file"], "output: expected --dump with it, got none"),
        (["--build", "--format", "ptx"], "format: expected --dump with it, got none"),
        (
            ["--backend", "triton", "--arch", "sm_75"],
            "arch: expected sm_80 or sm_86 or sm_89 or sm_90 or sm_120 or sm_121, got 'sm_75'",
        ),
    ],
)
def test_arguments_of_a_build(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", *arguments]) == 2
    assert capsys.readouterr().err == f"expertd kernels: {said}\n"


def test_an_unknown_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--dump", "nothing"]) == 2
    error = capsys.readouterr().err
    assert f"dump: expected one of {', '.join(NAMES)}, got 'nothing'" in error


@pytest.mark.usefixtures("use_full_cache")
def test_a_missing_disassembler_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    assert main(["kernels", "--dump", NAMES[0], "--format", "sass"]) == 2
    assert "nvdisasm: expected on PATH or installed" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--dump", NAMES[0], "-o", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.thorough
def test_without_the_cuda_extra_it_exits_with_2_and_one_sentence() -> None:
    code = (
        "import sys; sys.modules['cuda.core'] = None\n"
        "from expertd.service.cli import main\n"
        "sys.exit(main(['kernels']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("expertd kernels: CUDA compiler: expected it to be installed")
