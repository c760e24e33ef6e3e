"""Files that cannot be read or written are reported with their path and the reason."""

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.util.files import (
    NO_ROOM,
    UnwritableError,
    check_readable,
    check_writable,
    read_text,
    temporary_folder,
    write_whole,
)
from tests.service.checkpoints.encoders import bf16
from tests.service.checkpoints.layouts import write
from tests.service.full import REASONS, break_temporary_files, largest_file
from tests.service.moe.test_weights import SHAPE
from tests.service.processes import forked_python

UID = 65534 if os.geteuid() == 0 else os.geteuid()
DENIED = (
    f"cannot be read: Permission denied to uid {UID}, and it belongs to uid {os.geteuid()} with mode 0000"
)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, unlike those of tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_nobody(code: str, directory: Path) -> str:
    """The output of `code` in a process that may not read root's files.

    It imports everything first, because the other user may not read the code.
    """
    script = directory / "program.py"
    script.write_text(
        "import os\nfrom pathlib import Path\n"
        "from expertd.service.checkpoints import CheckpointError, models_of\n"
        "from expertd.service.moe.weights import load_weights\n"
        "from expertd.service.moe.shape import LayerShape\n"
        "from expertd.service.settings.loader import SettingsError, load_settings\n"
        "from expertd.service.settings.served import CheckpointSettings\n"
        f"if os.geteuid() == 0: os.setuid({UID})\n"
        f"try: {code}\n"
        "except (ValueError, SettingsError) as error: print(error)\n"
    )
    result = forked_python(script)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def weights(directory: Path) -> tuple[Path, str]:
    path = directory / "layer.safetensors"
    save_weights(path, random_weights(SHAPE, 0, "cpu"))
    return path, f"load_weights({str(path)!r}, LayerShape(256, 128, 3, 2), 'cpu')"


def checkpoint(name: str, directory: Path) -> tuple[Path, str]:
    """With one unreadable file, or its folder."""
    model = directory / "model"
    write(model, bf16, quantization=None)
    for file in model.iterdir():
        file.chmod(0o644)
    return model / name, f"models_of(CheckpointSettings(path={str(model)!r}, layers='all'))"


def configuration(directory: Path) -> tuple[Path, str]:
    path = directory / "config.yaml"
    path.write_text("port: 1")
    return path, f"load_settings(Path({str(path)!r}))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        weights,
        partial(checkpoint, "config.json"),
        partial(checkpoint, "model.safetensors"),
        partial(checkpoint, ""),
        configuration,
    ],
)
def test_what_is_unreadable_is_named_with_the_remedy(
    make: Callable[[Path], tuple[Path, str]], open_directory: Path, tmp_path: Path
) -> None:
    path, code = make(open_directory)
    is_folder = path.is_dir()
    path.chmod(0)
    output = as_nobody(code, tmp_path)
    path.chmod(0o700)
    expected = f"{path}: {DENIED}; make it readable (chmod a+r"
    if is_folder:
        expected = f"{path}/config.json: cannot be read: Permission denied to uid {UID}; make it"
    assert output.startswith(expected)
    assert is_folder or "--user in a container" in output


def test_other_file_types_and_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a regular file, got a directory$"):
        check_readable(tmp_path)
    with pytest.raises(ValueError, match=r"none: cannot be read: No such file or directory$"):
        check_readable(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin: expected UTF-8, got .* at byte 3$"):
        read_text(tmp_path / "latin")


@pytest.mark.parametrize("kind", REASONS)
def test_without_a_temporary_folder_the_reason_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = break_temporary_files(monkeypatch, kind, tmp_path)
    expected = "it: expected a folder for temporary files (TMPDIR) that can be written to"
    with pytest.raises(UnwritableError) as caught, temporary_folder("it"):
        pass
    assert str(caught.value) == f"{expected}, got {tried}: {REASONS[kind]}"
    assert os.strerror(caught.value.errno or 0) == REASONS[kind]


def test_a_temporary_folder_may_be_lost_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UnwritableError, match=rf"got {tmp_path}/gone: No such file or directory$"):
        temporary_folder("it").__enter__()


def test_a_temporary_folder_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("it") as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    with pytest.raises(KeyError), temporary_folder("it"):
        raise KeyError
    with temporary_folder("it") as folder:
        folder.rmdir()  # as an HTTP process does when the server is gone
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("new", None),
        ("old", None),
        ("pipe", None),
        ("missing/new", "No such file or directory"),
        ("old/new", "Not a directory"),
    ],
)
def test_a_file_is_tried_before_it_is_written(tmp_path: Path, name: str, reason: str | None) -> None:
    (tmp_path / "old").write_bytes(b"old")
    os.mkfifo(tmp_path / "pipe")
    if reason is None:
        check_writable(tmp_path / name, "it")
    else:
        with pytest.raises(UnwritableError, match=f"got {tmp_path / name}: {reason}$"):
            check_writable(tmp_path / name, "it")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "pipe"}
    assert (tmp_path / "old").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["new", "old", "link"])
def test_no_part_of_a_file_is_left(tmp_path: Path, name: str) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "link").symlink_to("/dev/full")
    with largest_file(1000), pytest.raises(UnwritableError) as caught:
        write_whole(tmp_path / name, bytes(2000), "it")
    assert caught.value.errno in NO_ROOM
    assert str(caught.value).startswith(
        f"it: expected a file that can be written to, got {tmp_path / name}: "
    )
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link"} - ({name} - {"link"})
    write_whole(tmp_path / "new", bytes(2000), "it")
    assert (tmp_path / "new").stat().st_size == 2000
