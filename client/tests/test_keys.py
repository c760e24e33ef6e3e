"""API keys: sent with every call, taken from the environment, and shown nowhere."""

import json
import logging
import pickle
import re
import traceback
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from expertd_client import AccessDeniedError, AsyncExpertClient, ExpertClient, InvalidRequestError
from expertd_client.__main__ import main
from expertd_client.address import parse_address
from tests.callers import Connect
from tests.expertd import HIDDEN, MODEL, RunningServer, channels_in, running_server
from tests.fakes import FakeServer, answer, answering, echoing, fake_server

KEY = "yvZ8KQeUo0v1p2-BqQ6m8w3s5d7f9h1k2"
OTHER = "other-yvZ8KQeUo0v1p2"
ROWS = np.ones((2, HIDDEN), np.float32)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTD_KEY", raising=False)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys and channels."""
    directory = tmp_path_factory.mktemp("guarded")
    keys = directory / "keys.yaml"
    entries = ((KEY, "caller", "infer"), (OTHER, "scraper", "metrics"))
    keys.write_text(
        json.dumps(
            [
                {"name": name, "sha256": sha256(key.encode()).hexdigest(), "rights": [right]}
                for key, name, right in entries
            ]
        )
    )
    with running_server(directory, f"keys={keys}", channels_in(directory)) as running:
        yield running


def sent(server: FakeServer) -> list[str | None]:
    return [request.headers.get("authorization") for request in server.requests]


def test_a_key_is_sent_with_every_call(connect: Connect) -> None:
    with fake_server(echoing) as server:
        caller = connect(server.url, key="Abc")
        caller.infer("m", ROWS)
        caller.close()
    with fake_server(answering(answer(200, b"[]"), answer(200), answer(200))) as others:
        caller = connect(others.url, key="Abc")
        assert caller.models() == []
        assert caller.ready()
        assert caller.live()
        caller.close()
    assert sent(server) + sent(others) == ["bearer abc"] * 4, "fakes have headers in lower case"


def test_the_key_of_the_environment(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    def key_sent(**options: str) -> str | None:
        with fake_server(answering(answer(200))) as server:
            caller = connect(server.url, **options)
            assert caller.live()
            caller.close()
        (found,) = sent(server)
        return found

    assert key_sent() is None
    monkeypatch.setenv("EXPERTD_KEY", "one")
    assert key_sent() == "bearer one"
    assert key_sent(key="two") == "bearer two"
    assert key_sent(key="") is None


@pytest.mark.parametrize("key", [f"{KEY} ", f"{KEY}\n", f"{KEY}\r\nX: y", f"{KEY}ü", KEY.encode(), 7])
def test_keys_that_cannot_be_sent(key: object, monkeypatch: pytest.MonkeyPatch) -> None:
    text = r"^key: expected printable ASCII without spaces, got something else$"
    with pytest.raises(InvalidRequestError, match=text) as error:
        ExpertClient("http://x", key=key)  # type: ignore[arg-type]
    assert KEY not in "".join(traceback.format_exception(error.value))
    if isinstance(key, str):
        monkeypatch.setenv("EXPERTD_KEY", key)
        with pytest.raises(InvalidRequestError, match=text):
            AsyncExpertClient("unix:/x")


def test_a_key_is_not_shown() -> None:
    for url in ("http://x", "unix:/x"):
        address = parse_address(url, KEY)
        assert address.key == KEY
        assert KEY not in repr(address)
        assert KEY not in repr(ExpertClient(url, key=KEY))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "channel", "http"])
def test_every_transport_with_a_server_that_has_keys(
    connect: Connect, guarded: RunningServer, transport: str
) -> None:
    caller = connect(guarded.url, key=KEY, transport=transport)
    assert caller.infer(MODEL, ROWS).shape == ROWS.shape
    assert caller.metadata(MODEL).hidden_size == HIDDEN
    assert caller.ready(MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "channel", "http"])
@pytest.mark.parametrize(
    ("key", "status", "text"),
    [
        ("", 401, "Authorization: expected Bearer and a key, got none"),
        (f"{KEY}x", 401, "Authorization: expected a key of this server, got an unknown one"),
        (OTHER, 403, r"key scraper: expected the right infer( or admin)?, got metrics"),
    ],
)
def test_every_transport_without_the_right_key(
    connect: Connect,
    guarded: RunningServer,
    transport: str,
    key: str,
    status: int,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    caller = connect(guarded.url, key=key, transport=transport)
    with pytest.raises(AccessDeniedError) as error:
        caller.infer(MODEL, ROWS)
    assert error.value.status == status
    assert re.fullmatch(text, str(error.value))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert caller.ready(), "health needs no key"
    shown = "".join(traceback.format_exception(error.value)) + caplog.text
    assert not key or key not in shown
    copy = pickle.loads(pickle.dumps(error.value))
    assert (type(copy), str(copy), copy.status) == (AccessDeniedError, str(error.value), status)


@pytest.mark.slow
def test_a_channel_needs_a_key_with_the_right(connect: Connect, guarded: RunningServer) -> None:
    with pytest.raises(AccessDeniedError):
        connect(guarded.url, key=OTHER).open_channel(MODEL, max_tokens=2)
    with connect(guarded.url, key=KEY).open_channel(MODEL, max_tokens=2) as channel:
        assert channel is not None


@pytest.mark.slow
def test_the_bench_takes_the_key_of_the_environment(
    guarded: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    arguments = ["bench", "--url", guarded.url, "--seconds", "0.1", "--warmup", "0.1", "--tokens", "1"]
    arguments += ["--connections", "1", "--json", str(tmp_path / "bench.json")]
    assert main(arguments) == 2
    assert "Authorization: expected Bearer and a key, got none" in capsys.readouterr().err
    monkeypatch.setenv("EXPERTD_KEY", KEY)
    assert main(arguments) == 0
    assert KEY not in (tmp_path / "bench.json").read_text()
