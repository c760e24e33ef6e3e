"""docs/internals/channels.md: its tables are the code's layout, and its client works."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from expertd.service.channels.geometry import Geometry
from expertd.service.settings.loader import load_settings
from expertd_client.channel.layout import (
    ANSWER,
    ANSWER_OFFSET,
    ERROR_BYTES,
    ERROR_OFFSET,
    GREETING,
    HEADER,
    HEADER_BYTES,
    REQUEST,
    SLOT_BYTES,
    VERSION,
)
from tests.paths import DEMO, ROOT
from tests.service.processes import clean_environment, server_process

TEXT = (ROOT / "docs" / "internals" / "channels.md").read_text()
SIZES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "8 bytes": "8s"}


def table(heading: str) -> list[tuple[int, str]]:
    """(offset, type) of the rows of the first table after `heading`."""
    after = TEXT[TEXT.index(heading) :]
    rows = re.search(r"^(?:\|.*\n)+", after, re.M)
    assert rows
    return [(int(offset), kind) for offset, kind in re.findall(r"^\| (\d+) \| ([^|]+) \|", rows[0], re.M)]


@pytest.mark.parametrize(
    ("heading", "layout"),
    [
        ("The control memory begins with", HEADER),
        ("### Request line", struct.Struct("<Q" + REQUEST.format[1:])),
        ("### Answer line", struct.Struct("<Q" + ANSWER.format[1:] + "QQQ")),
    ],
)
def test_the_tables_are_the_codes_layout(heading: str, layout: struct.Struct) -> None:
    rows = table(heading)
    assert len(rows) > 6
    packed = "<" + "".join(SIZES[kind] for _, kind in rows)
    assert [offset for offset, _ in rows] == [
        struct.calcsize("<" + "".join(SIZES[kind] for _, kind in rows[:index])) for index in range(len(rows))
    ], "without gaps"
    expanded = re.sub(r"(\d+)([A-Z])", lambda found: found[2] * int(found[1]), layout.format)
    assert packed == expanded


def test_the_parts_of_a_slot() -> None:
    parts = re.findall(r"^\| (\d+) \| (\d+) \| ([a-z ]+)[,|]", TEXT, re.M)
    assert [(int(offset), int(size)) for offset, size, _ in parts] == [
        (0, 64),
        (ANSWER_OFFSET, 64),
        (ERROR_OFFSET, ERROR_BYTES),
    ]
    assert f"`{HEADER_BYTES} + {SLOT_BYTES} * i`" in TEXT
    assert b"expertd\0" + struct.pack("<I", VERSION) == GREETING


def test_the_answer_is_that_of_the_demo() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```$", TEXT, re.M | re.S)
    shown = json.loads(block)
    (model,) = load_settings(DEMO).models
    sizes = (model.hidden_size, model.top_k, 4)
    assert shown["geometry"] == Geometry.for_slots(2, 64, *sizes).shown()
    assert shown["version"] == VERSION


@pytest.mark.slow
def test_the_client_works(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
    settings = load_settings(DEMO)
    settings = settings.model_copy(
        update={"channels": settings.channels.model_copy(update={"socket": tmp_path / "channels"})}
    )
    with server_process(settings, tmp_path) as server:
        program = program.replace("http://127.0.0.1:8000", f"http://{server.url}")
        many = "for n in range(1, 65):\n    channel.infer(np.ones((n, 512), np.float32))\n"
        wrong = "try:\n    channel.infer(np.ones((65, 512), np.float32))\n"
        wrong += "except RuntimeError as error:\n    print(error)\n"
        closed = f"channels = 'http://{server.url}/v1/channels/1'\n"
        closed += "urllib.request.urlopen(urllib.request.Request(channels, method='DELETE')).close()\n"
        closed += "try:\n    channel.infer(np.ones((1, 512), np.float32))\n"
        closed += "except ConnectionError as error:\n    print(error)\n"
        result = subprocess.run(
            [sys.executable, "-c", f"{program}\n{many}\n{wrong}\n{closed}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=clean_environment(),
        )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "(5, 512)",
        "num_tokens: expected at most 64, got 65",
        "the server has closed the channel",
    ]
