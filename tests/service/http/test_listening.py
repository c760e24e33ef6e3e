"""Unix sockets: who may connect, what happens to files in the way, and what stays behind."""

import os
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from expertd.service.http.listening import BindError, NoChannelsError, listen, listen_for_channels
from expertd.service.settings.model import Settings
from tests.paths import DEMO
from tests.service.apps import hidden_request, tiny_settings
from tests.service.processes import EXPERTD, clean_environment, expertd, started
from tests.service.waiting import wait_for


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "expertd.sock"


def settings(path: Path) -> Settings:
    return tiny_settings(uds=path)


def accepts(path: Path) -> bool:
    """Whether somebody listens: the file is there a moment before."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_only_the_user_may_connect(path: Path) -> None:
    listener = listen(settings(path))
    assert listener.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert accepts(path)
    listener.close()
    assert not path.exists()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """That of the user's session, and that for temporary files."""
    session, temporary = tmp_path / "session", tmp_path / "temporary"
    session.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return session, temporary


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.3.4.5"])
def test_channels_of_a_server_on_loopback_have_a_socket_named_by_its_port(
    folders: tuple[Path, Path], host: str
) -> None:
    ours = tiny_settings(host=host)
    made = [listen_for_channels(ours, port) for port in (8000, 8001)]
    for port, listener in zip((8000, 8001), made, strict=True):
        assert listener is not None
        assert listener.path == folders[0] / f"expertd-{os.geteuid()}-{port}.sock"
        assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
        listener.remove()
    assert list(folders[0].iterdir()) == []


@pytest.mark.parametrize("session", ["", "relative", "/no/such/folder", "a file"])
def test_without_a_session_that_socket_is_a_temporary_file(
    folders: tuple[Path, Path], session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if session == "a file":
        session = str(folders[0].parent / "file")
        Path(session).touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", session)
    stale = folders[1] / f"expertd-{os.geteuid()}-8000.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))  # as a killed server leaves it
    listener = listen_for_channels(tiny_settings(), 8000)
    assert listener is not None
    assert (listener.path, accepts(stale)) == (stale, True)
    listener.remove()


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"uds": "/run/expertd.sock"},
        {"channels": {"socket": None}},
        {"channels": {"socket": ""}},
    ],
    ids=str,
)
def test_other_servers_have_no_channels_by_default(
    folders: tuple[Path, Path], changes: dict[str, Any]
) -> None:
    assert listen_for_channels(tiny_settings(**changes), 8000) is None
    assert [entry for folder in folders for entry in folder.iterdir()] == []


def test_a_server_that_finds_no_place_for_channels_says_why(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    first = listen_for_channels(tiny_settings(), 8000)  # another server, such as one of another container
    assert first is not None
    taken = f"channels.socket: expected a free path, got {first.path}, on which another server listens"
    with pytest.raises(NoChannelsError, match=f"^{taken}; callers on this machine take HTTP$"):
        listen_for_channels(tiny_settings(), 8000)
    with pytest.raises(BindError, match=f"^{taken}$"):  # which was asked for
        listen_for_channels(tiny_settings(channels={"socket": first.path}), 8000)
    with pytest.raises(BindError, match=r"^channels\.group: expected the name of a group"):
        listen_for_channels(tiny_settings(channels={"group": "no such group"}), 8001)
    first.remove()
    (long := folders[1] / ("x" * 100)).mkdir()
    for folder in (str(long), "/no/such"):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(NoChannelsError, match=f"^channels.socket: expected a .* got {folder}.*; callers"):
            listen_for_channels(tiny_settings(), 8000)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_signal_before_the_server_runs_leaves_no_files(tmp_path: Path, path: Path) -> None:
    """It comes as soon as the folder of the socket between the processes is there."""
    options = ["--uds", str(path), "--http-workers", "2", "--set", f"channels.socket={tmp_path / 'channels'}"]
    command: list[str | Path] = [EXPERTD, "serve", "--config", DEMO, *options]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        command, env=clean_environment(TMPDIR=str(temporary)), stderr=subprocess.DEVNULL
    )
    try:
        while not any(temporary.glob("expertd-*")):
            assert process.poll() is None
            time.sleep(1e-3)  # else the server has one core less for its imports
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert list(temporary.iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["temporary"]


def test_a_socket_that_nobody_listens_on_is_replaced_and_anything_else_left_alone(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    first = listen(settings(path))
    with pytest.raises(BindError) as caught:
        listen(settings(path))
    assert str(caught.value) == f"uds: expected a free path, got {path}, on which another server listens"
    assert accepts(path)
    first.close()
    path.write_text("mine")
    with pytest.raises(BindError, match=r"expected a free path or a socket, got .* another file"):
        listen(settings(path))
    assert path.read_text() == "mine"
    for name in ("missing/expertd.sock", "x" * 200):
        with pytest.raises(BindError, match="uds: expected a path for a new socket, got "):
            listen(settings(path.parent / name))


def test_the_file_of_another_server_is_not_removed(path: Path) -> None:
    first = listen(settings(path))
    path.rename(path.with_suffix(".old"))
    second = listen(settings(path))
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "http_workers"), [(1, 2), (3, 1)])
def test_a_server_on_a_unix_socket_answers_and_leaves_no_file(
    path: Path, signals: int, http_workers: int, tmp_path: Path
) -> None:
    options = ["--http-workers", str(http_workers)]
    command: list[str | Path] = [EXPERTD, "serve", "--config", DEMO, "--uds", path, *options]
    with (tmp_path / "server.log").open("wb") as stderr:
        process = started(command, stderr, clean_environment())
        try:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://unix", timeout=60) as client:
                wait_for(lambda: accepts(path), "the server listens")
                wait_for(lambda: client.get("/v2/health/ready").status_code == 200, "the server is ready")
                body = hidden_request(np.ones((2, 512), np.float32))
                headers = {"Inference-Header-Content-Length": str(body[1])}

                def answers() -> bool:
                    answer = client.post("/v2/models/demo/infer", content=body[0], headers=headers)
                    return answer.status_code == 200

                wait_for(answers, "the process has its channel")
                assert "got" in expertd("serve", "--config", DEMO, "--uds", path).stderr
                for _ in range(signals):
                    process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()
            process.wait()
        log = Path(stderr.name).read_text()
    assert signals > 1 or code == 0, log
    assert f"listening on unix:{path}" in log
    assert "Traceback" not in log
    assert not path.exists()
