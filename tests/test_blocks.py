"""Every code block of the documents is run, or says why not."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd.service.cli import main
from expertd.service.settings.loader import load_settings
from tests.blocks import Block, blocks
from tests.paths import DEMO, ROOT
from tests.service.processes import ServerProcess, clean_environment, server_process

BLOCKS = blocks()
SAYS = re.compile(r"run(?:: alone|: output)?|check|part of \S+|tested by (\S+)::(test_\w+)|not run: \w.{10,}")
_VARIES = re.compile(r"\d+(?= ms\b)|(#+ )?\d+(?= tokens$)", re.M)


def saying(text: str) -> list[Block]:
    return [block for block in BLOCKS if block.says == text]


def test_every_block_is_run_or_says_why_not() -> None:
    assert len(BLOCKS) > 80
    silent = [block for block in BLOCKS if block.language != "yaml" and not SAYS.fullmatch(block.says)]
    assert [str(block) for block in silent] == []


def test_every_comment_about_a_block_is_above_one() -> None:
    known = r"^<!-- (?:run|check|part of|tested by|not run)\b.* -->\n(?!```)"
    assert [
        document for document in {b.document for b in BLOCKS} if re.search(known, _text(document), re.M)
    ] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.says.startswith("tested by")], ids=str)
def test_the_test_of_a_block_reads_its_document(block: Block) -> None:
    found = SAYS.fullmatch(block.says)
    assert found is not None
    source = _text(found[1])
    assert re.search(rf"^(?:async )?def {found[2]}\(", source, re.M), block.says
    assert Path(block.document).name in source, f"{found[1]}: expected it to read {block.document}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.says.startswith("part of")], ids=str)
def test_a_part_of_a_file_is_in_it(block: Block) -> None:
    assert block.text in _text(block.says.removeprefix("part of "))


def _text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("block", saying("check"), ids=str)
def test_commands_that_serve_would_start(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for command in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        assert words[:2] in (["expertd", "serve"], [".venv/bin/expertd", "serve"]), command
        code = main(["check", *words[2:], "--port", "0"])
        assert code == 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo layer, for all blocks."""
    with server_process(load_settings(DEMO), tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Looks like the repository to commands, but what they write is elsewhere."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name in ("configs", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "block",
    saying("run") + [pytest.param(block, marks=pytest.mark.timing) for block in saying("run: alone")],
    ids=str,
)
def test_a_block_runs_as_pasted(block: Block, server: ServerProcess, folder: Path) -> None:
    assert block.language in ("sh", "python")
    text = re.sub(r"\b(localhost|127\.0\.0\.1):8000\b", server.url, block.text)
    command = ["bash", "-e", "-c", text] if block.language == "sh" else [sys.executable, "-c", text]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    following = BLOCKS[BLOCKS.index(block) + 1 :][:1]
    if following and following[0].document == block.document and following[0].says == "run: output":
        assert without_figures(done.stdout) == without_figures(following[0].text)


def without_figures(text: str) -> str:
    """`text` without what differs between machines: times, and tokens that a near tie sends elsewhere."""
    return _VARIES.sub("N", text).strip()
