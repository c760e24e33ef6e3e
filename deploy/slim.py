"""Removes from an environment what serving never reads: `python slim.py DIRECTORY`, the folder site-packages.

The Dockerfile runs it after installing the locked packages; deploy/image_tree.py does so without Docker.
A library that one of torch's needs to be loaded stays. Uses only the standard library, `strip` and `readelf`.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath

# Folders and files below site-packages, and what they are
UNUSED = {
    "torch/test": "C++ tests",
    "torch/bin/*": "C++ tests and protoc",
    "torch/include": "headers",
    "torch/share": "CMake files",
    "triton": "a compiler, also torch.compile's: kernels for other GPUs than Hopper are compiled already",
    "nvidia/*/include": "headers",
    "nvidia/**/*.a": "static libraries",
    "nvidia/*/lib/*.bc": "device code to link with",
    "nvidia/*/nvvm": "a compiler that is not NVRTC's",
    "nvidia/*/lib/libnvvm.so*": "the same",
    "nvidia/*/lib/libnvrtc*.alt.so*": "NVRTC once more, built otherwise",
    "nvidia/*/lib/libcudnn_*": "cuDNN's parts, loaded by its first call: there is no convolution",
    "nvidia/*/lib/libcusolver*": "needed by the library below",
    "torch/lib/libtorch_cuda_linalg.so": "loaded by the first call of torch.linalg on a GPU",
    "**/tests": "tests",
    "**/*.pyi": "type stubs",
    "**/*.pxd": "Cython's headers",
    "**/__pycache__": "bytecode: only that of imported modules is made again",
}
KEPT = ("torch/bin/torch_shm_manager",)  # torch looks for it when it is imported
_STRIPPED = ("torch/lib/*.so*", "llvmlite/binding/*.so")  # of symbols for debuggers; the dynamic ones stay


def slim(packages: Path) -> dict[str, int]:
    """Remove what is unused; returns the bytes saved by each pattern."""
    saved, needed = {}, needed_libraries(packages)
    for pattern in UNUSED:
        found = [path for path in _found(packages, pattern) if path.name not in needed]
        saved[pattern] = sum(map(_remove, found))
    for pattern in _STRIPPED:
        libraries = [path for path in sorted(packages.glob(pattern)) if not path.is_symlink()]
        saved[f"strip {pattern}"] = sum(_strip(path) for path in libraries)
    return saved


def is_unused(file: str) -> bool:
    """Whether a file, relative to site-packages, is among what `slim` removes."""
    path = PurePath(file)
    parents = [path, *path.parents]
    return file not in KEPT and any(_matches(each, pattern) for each in parents for pattern in UNUSED)


def needed_libraries(packages: Path) -> set[str]:
    """File names of the libraries that torch's own need, but for those of torch that are unused."""
    own = [path for path in packages.glob("torch/lib/*.so*") if not is_unused(f"torch/lib/{path.name}")]
    listed = [
        subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        for path in own
    ]
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", "".join(listed)))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_symlink() or not each.is_dir())


def _found(packages: Path, pattern: str) -> Iterator[Path]:
    for path in sorted(packages.glob(pattern)):
        if str(path.relative_to(packages)) not in KEPT:
            yield path


def _matches(path: PurePath, pattern: str) -> bool:
    folder, is_anywhere, rest = pattern.rpartition("**/")
    if not is_anywhere:
        return len(path.parts) == len(PurePath(pattern).parts) and path.match(pattern)
    top = PurePath(folder).parts
    return path.parts[: len(top)] == top and path.match(rest)


def _remove(path: Path) -> int:
    try:
        size = size_of(path)
    except FileNotFoundError:  # it was inside another one
        return 0
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return size


def _strip(library: Path) -> int:
    before = library.stat().st_size
    aside = library.with_suffix(".stripped")
    subprocess.run(["strip", "--strip-unneeded", "-o", aside, library], check=True)
    aside.replace(library)
    return before - library.stat().st_size


if __name__ == "__main__":
    for what, num_bytes in slim(Path(sys.argv[1])).items():
        print(f"{num_bytes / 1e6:8.1f} MB  {what:28} {UNUSED.get(what, '')}")
