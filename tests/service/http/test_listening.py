"""Unix sockets: who may connect, what happens to files in the way, and what stays behind."""

import signal
import socket
import stat
import subprocess
from pathlib import Path

import httpx
import pytest

from expertd.service.http.listening import BindError, listen
from expertd.service.settings.model import Settings
from tests.paths import DEMO
from tests.service.apps import tiny_settings
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
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()
    assert not path.exists()


@pytest.mark.slow
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
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert list(temporary.iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["temporary"]


def test_a_socket_that_nobody_listens_on_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    listener = listen(settings(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_a_server_that_listens_is_left_alone(path: Path) -> None:
    first = listen(settings(path))
    with pytest.raises(BindError) as caught:
        listen(settings(path))
    assert str(caught.value) == f"uds: expected a free path, got {path}, on which another server listens"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    first.close()


def test_other_files_are_left_alone(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(BindError, match=r"expected a free path or a socket, got .* another file"):
        listen(settings(path))
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["missing/expertd.sock", "x" * 200])
def test_an_impossible_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BindError, match="uds: expected a path for a new socket, got "):
        listen(settings(tmp_path / name))


def test_the_file_of_another_server_is_not_removed(path: Path) -> None:
    first = listen(settings(path))
    path.rename(path.with_suffix(".old"))
    second = listen(settings(path))
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2, 3])
def test_a_server_on_a_unix_socket_answers_and_leaves_no_file(
    path: Path, signals: int, tmp_path: Path
) -> None:
    command: list[str | Path] = [EXPERTD, "serve", "--config", DEMO, "--uds", path]
    with (tmp_path / "server.log").open("wb") as stderr:
        process = started(command, stderr, clean_environment())
        try:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://unix", timeout=30) as client:
                wait_for(lambda: accepts(path), "the server listens")
                wait_for(lambda: client.get("/v2/health/ready").status_code == 200, "the server is ready")
                assert "got" in expertd("serve", "--config", DEMO, "--uds", path).stderr
                for _ in range(signals):
                    process.send_signal(signal.SIGTERM)
            process.wait(30)
        finally:
            process.kill()
            process.wait()
        log = Path(stderr.name).read_text()
    assert f"listening on unix:{path}" in log
    assert "Traceback" not in log
    assert not path.exists()
