"""The JIT on any machine (NVRTC needs no GPU): cache, keys, errors, several processes at once."""

import logging
import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from importlib import metadata
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda.bindings import nvrtc
from filelock import FileLock

from expertd.kernels import jit
from expertd.kernels.jit import Source, cache
from expertd.kernels.jit import source as source_module
from expertd.kernels.jit.build import cache_key
from tests.service.full import largest_file

_HEADER = "#pragma once\nconstexpr float kScale = 2;\n"
_OTHER = '#pragma once\n  #  include "scale.cuh"\nconstexpr float kTwice = kScale * 2;\n'
_KERNEL = """#include "scale.cuh"
#include "other.cuh"  // which includes the first again
extern "C" __global__ void scale(float* x) { x[threadIdx.x] = x[threadIdx.x] * kTwice + PLUS; }
"""
PLUS_1 = Source(name="plus_1", file="scale.cu", entry="scale", defines=(("PLUS", "1"),))
PLUS_2 = Source(name="plus_2", file="scale.cu", entry="scale", defines=(("PLUS", "2"),))
BROKEN = Source(name="broken", file="scale.cu", entry="scale", defines=(("PLUS", "no_such_thing"),))


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(directory))
    return directory


@pytest.fixture(autouse=True)
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "csrc"
    directory.mkdir()
    for name, text in (("scale.cuh", _HEADER), ("other.cuh", _OTHER), ("scale.cu", _KERNEL)):
        (directory / name).write_text(text)
    monkeypatch.setattr(source_module, "CSRC", directory)
    return directory


def entry_of(source: Source, cache_dir: Path) -> Path:
    return cache_dir / f"{cache_key(source)}.bin"


def test_the_second_build_is_a_hit() -> None:
    before = jit.stats()
    assert jit.find(PLUS_1) is None
    first, second = jit.build(PLUS_1), jit.build(PLUS_1)
    assert (first.cached, second.cached) == (False, True)
    assert first.cubin.startswith(b"\x7fELF")
    assert first == jit.Binary(second.cubin, second.usage, second.log, second.seconds, cached=False)
    assert jit.find(PLUS_1) == second
    after = jit.stats()
    assert after.compilations - before.compilations == 1
    assert after.cache_hits - before.cache_hits == 1
    assert after.compile_seconds - before.compile_seconds == pytest.approx(first.seconds)


def test_a_cache_hit_needs_no_lock_and_no_writable_directory(cache_dir: Path) -> None:
    jit.build(PLUS_1)
    for path in cache_dir.iterdir():
        if path.suffix != ".bin":
            path.unlink()
    assert jit.build(PLUS_1).cached
    assert [path.suffix for path in cache_dir.iterdir()] == [".bin"]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with one variant, and a cache that is still empty."""
    directory = tmp_path / "built"
    jit.build(PLUS_1, directory)
    monkeypatch.setattr(cache, "BUNDLE", directory)
    return directory


def test_what_the_bundle_has_is_not_compiled(bundle: Path, cache_dir: Path) -> None:
    before = jit.stats()
    assert jit.build(PLUS_1).cached
    assert jit.find(PLUS_1) == jit.build(PLUS_1)
    assert jit.stats().compilations == before.compilations
    assert not cache_dir.exists(), "a hit needs no cache"


def test_what_the_bundle_lacks_goes_to_the_cache(bundle: Path, cache_dir: Path) -> None:
    entry_of(PLUS_1, bundle).write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in bundle.iterdir()}
    assert [jit.build(source).cached for source in (PLUS_1, PLUS_2)] == [False, False]
    assert {entry_of(source, cache_dir).exists() for source in (PLUS_1, PLUS_2)} == {True}
    assert {path: path.read_bytes() for path in bundle.iterdir()} == before


def test_binaries_do_not_depend_on_path_or_time(csrc: Path, tmp_path: Path) -> None:
    binary = jit.compile_source(PLUS_1)
    assert jit.compile_source(PLUS_1).cubin == binary.cubin
    assert str(tmp_path).encode() not in binary.cubin
    assert b"kernels/csrc" in binary.cubin, "line information is expected"


def _flipped(content: bytes, position: int) -> bytes:
    damaged = bytearray(content)
    damaged[position] ^= 1
    return bytes(damaged)


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda content, keep=keep: content[:keep] for keep in (0, 10, 500, -1)),
        *(lambda content, at=at: _flipped(content, at) for at in (0, 1000, -40, -1)),
    ],
)
def test_a_damaged_entry_is_built_again(
    damage: Callable[[bytes], bytes], cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = jit.build(PLUS_1)
    entry = entry_of(PLUS_1, cache_dir)
    entry.write_bytes(damage(entry.read_bytes()))
    assert jit.find(PLUS_1) is None
    again = jit.build(PLUS_1)
    assert (again.cached, again.cubin) == (False, whole.cubin)
    assert f"cache entry {entry} is damaged" in caplog.text
    assert jit.build(PLUS_1).cached


def test_an_entry_that_cannot_be_read_is_logged(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry_of(PLUS_1, cache_dir).mkdir(parents=True)
    assert not jit.build(PLUS_1).cached
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("place", ["a file", "/proc/expertd"])
def test_a_directory_that_cannot_be_made_costs_only_time(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(place) if place.startswith("/") else tmp_path / place
    if not place.startswith("/"):
        directory.write_text("in the way")
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(directory))
    assert [jit.build(PLUS_1).cached for _ in range(2)] == [False, False]
    assert f"the kernel cache {directory} is used without a lock" in caplog.text
    assert "is not kept for the next start" in caplog.text


def test_a_crash_between_writing_and_renaming_leaves_no_entry(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:

        def crash(*_: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            jit.build(PLUS_1)
    assert [path.suffix for path in cache_dir.iterdir() if path.suffix != ".lock"] == [".part"]
    assert jit.find(PLUS_1) is None
    assert not jit.build(PLUS_1).cached
    assert [path.suffix for path in cache_dir.iterdir() if path.suffix != ".lock"] == [".bin"]
    assert jit.build(PLUS_1).cached


def test_a_full_disk_keeps_no_part_of_an_entry(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with largest_file(1000):
        assert not jit.build(PLUS_1).cached
    assert "is not kept for the next start: [Errno 27] File too large" in caplog.text
    assert [path.suffix for path in cache_dir.iterdir()] == [".lock"]
    assert not jit.build(PLUS_1).cached
    assert jit.build(PLUS_1).cached


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("cache", None),
        ("missing/cache", None),
        ("file", "Not a directory"),
        ("file/cache", "Not a directory"),
        ("/proc/expertd/cache", "No such file or directory"),
    ],
)
def test_a_directory_is_tried_before_anything_is_compiled(
    tmp_path: Path, place: str, reason: str | None
) -> None:
    (tmp_path / "file").touch()
    before = list(tmp_path.iterdir())
    if reason is None:
        jit.check_writable(tmp_path / place)
    else:
        text = f"kernel cache: expected a folder that can be written to, got {tmp_path / place}: {reason}"
        with pytest.raises(OSError, match=f"^{re.escape(text)}$"):
            jit.check_writable(tmp_path / place)
    assert list(tmp_path.iterdir()) == before
    with largest_file(0), pytest.raises(OSError, match=r"File too large$"):
        jit.check_writable(tmp_path)


def test_a_lock_held_forever_is_ignored(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    cache_dir.mkdir()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with FileLock(cache_dir / f"{cache_key(PLUS_1)}.lock"):
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert not jit.build(PLUS_1).cached
    finally:
        done.set()
        holder.join()
    assert "is used without a lock" in caplog.text
    assert jit.build(PLUS_1).cached


def test_the_key_changes_with_all_that_a_binary_depends_on(
    csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cache_key(PLUS_1), cache_key(PLUS_1), cache_key(PLUS_2)}
    (csrc / "scale.cuh").write_text(_HEADER.replace("2", "3"))
    keys.add(cache_key(PLUS_1))
    (csrc / "other.cuh").write_text(_OTHER.replace("2", "3"))
    keys.add(cache_key(PLUS_1))
    (csrc / "scale.cu").write_text(_KERNEL + "\n")
    keys.add(cache_key(PLUS_1))
    with monkeypatch.context() as patched:
        patched.setattr("cuda.core.__version__", "0.0")
        keys.add(cache_key(PLUS_1))
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "version", lambda name: "0.0")
        keys.add(cache_key(PLUS_1))
    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 99, 0))
        keys.add(cache_key(PLUS_1))
    assert len(keys) == 8


def test_the_key_changes_with_a_toolkits_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its patch releases all say the same version, and no package says another."""

    def no_package(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    library = tmp_path / "libnvrtc.so"
    library.write_bytes(b"a patch release")
    monkeypatch.setattr(metadata, "version", no_package)
    monkeypatch.setattr(
        "cuda.pathfinder.load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=str(library))
    )
    keys = [cache_key(PLUS_1), cache_key(PLUS_1)]
    os.utime(library, ns=(1, 1))
    keys.append(cache_key(PLUS_1))
    library.write_bytes(b"another")
    os.utime(library, ns=(1, 1))
    keys.append(cache_key(PLUS_1))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_broken_source_raises_with_options_and_log(csrc: Path) -> None:
    with pytest.raises(jit.CompileError) as caught:
        jit.build(BROKEN)
    for expected in ("broken", "PLUS=no_such_thing", "sm_90a", 'identifier "no_such_thing" is undefined'):
        assert expected in str(caught.value)
    assert "kernels/csrc/scale.cu(3): error" in str(caught.value)
    (csrc / "other.cuh").write_text(f"{_OTHER}\nnot C++;\n")
    with pytest.raises(jit.CompileError, match=r"kernels/csrc/other\.cuh\(5\): error"):
        jit.build(PLUS_1)
    assert jit.find(BROKEN) is None


def test_spills_of_functions_that_are_not_inlined_count(csrc: Path) -> None:
    (csrc / "scale.cu").write_text(
        "__device__ __noinline__ float sum(float* x, int i) {\n"
        "    float y[64]; for (int j = 0; j < 64; ++j) y[(j * i) % 64] = x[j]; return y[i];\n}\n"
        'extern "C" __global__ void scale(float* x) { x[0] = sum(x, PLUS + threadIdx.x); }\n'
    )
    assert jit.build(PLUS_1).usage.stack_bytes >= 256


def test_warnings_of_the_compiler_are_logged(csrc: Path, caplog: pytest.LogCaptureFixture) -> None:
    (csrc / "scale.cu").write_text('extern "C" __global__ void scale(float* x) { int unused = PLUS; }\n')
    with caplog.at_level(logging.WARNING):
        jit.build(PLUS_1)
    assert 'plus_1: kernels/csrc/scale.cu(1): warning #177-D: variable "unused"' in caplog.text


def test_build_all_yields_each_once_and_stops_at_an_error() -> None:
    built = dict(jit.build_all([PLUS_1, PLUS_2]))
    assert set(built) == {PLUS_1, PLUS_2}
    assert not any(binary.cached for binary in built.values())
    assert all(binary.cached for _, binary in jit.build_all([PLUS_1, PLUS_2]))
    with pytest.raises(jit.CompileError, match="no_such_thing"):
        list(jit.build_all([BROKEN, PLUS_1]))


def _build_at_once(csrc: Path, cache_dir: Path, ready: Barrier, results: "Queue[tuple[int, int]]") -> None:
    source_module.CSRC = csrc
    os.environ[jit.CACHE_DIR_VARIABLE] = str(cache_dir)  # the fork server may be older than the test's
    ready.wait()
    list(jit.build_all([PLUS_1, PLUS_2]))
    results.put((jit.stats().compilations, jit.stats().cache_hits))


@pytest.mark.slow
@pytest.mark.thorough
def test_several_processes_compile_a_variant_once(csrc: Path, cache_dir: Path) -> None:
    (csrc / "scale.cuh").write_text(_HEADER + _slow_to_compile())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # with torch, which takes seconds
    ready = context.Barrier(2)
    results: Queue[tuple[int, int]] = context.Queue()
    arguments = csrc, cache_dir, ready, results
    processes = [context.Process(target=_build_at_once, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    counts = [results.get() for _ in processes]
    assert sum(compilations for compilations, _ in counts) == 2
    assert sum(hits for _, hits in counts) == 2
    assert len(list(cache_dir.glob("*.bin"))) == 2


def _slow_to_compile() -> str:
    """Code that compiles slowly enough for other processes to arrive meanwhile."""
    steps = "".join(f"x = __sinf(x) * {i}.0f + __cosf(x);" for i in range(500))
    return (
        f"__device__ float slow(float x) {{ {steps} return x; }}\n__device__ float (*keep)(float) = slow;\n"
    )


def test_many_threads_compile_a_variant_once() -> None:
    before = jit.stats()
    threads = [threading.Thread(target=jit.build, args=(PLUS_1,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = jit.stats()
    assert after.compilations - before.compilations == 1
    assert after.cache_hits - before.cache_hits == 7


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert jit.cache_directory() == tmp_path / "cache"
    monkeypatch.delenv(jit.CACHE_DIR_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_directory() == tmp_path / "xdg" / "expertd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jit.cache_directory() == tmp_path / "home" / ".cache" / "expertd"
