"""Calls that the OpenAPI document describes, and some that it does not, to a server with everything on."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import just, one_of, text
from schemathesis.generation import GenerationMode

from expertd.service.http.rights import CALLS
from tests.fuzz.mutations import CASES, SENT
from tests.service.apps import MODEL, tiny_settings
from tests.service.keys import all_keys, bearer
from tests.service.processes import ServerProcess, server_process

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

EXAMPLES = max(10, CASES // 100)  # of each operation and mode
FEW = 10  # of calls that take their time
SPARE = "spare"  # the model that is loaded and unloaded
SERVED = (
    "POST /v2/models/{model}/infer",
    "POST /v2/repository/models/{model}/load",
    "POST /v2/repository/models/{model}/unload",
    "PUT /v1/log",
    "POST /v1/profile",
    "POST /v1/channels",
    "GET /metrics",
)
"""Some of what must have been done at least once, so that it was more than refused."""
run = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    everything: dict[str, Any] = {
        "models": [MODEL, {**MODEL, "name": SPARE}],
        "channels": {"socket": str(folder / "channels"), "max_channels": 4},
        "shared_memory": {"enabled": True},
        "keys": str(all_keys(folder / "keys.yaml")),
    }
    with server_process(tiny_settings(**everything), folder) as process:
        yield process


def operations(client: httpx.Client) -> Iterator[Any]:
    document = client.get("/openapi.json", headers=bearer("infer")).json()
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation: Any = result
        yield operation.ok()


def key_for(method: str, path: str) -> str:
    """The name of a key that may make this call."""
    return next(iter(CALLS[f"{'GET' if method == 'HEAD' else method} {path}"]), "infer")


def prepare(case: Any, chance: random.Random) -> None:
    """Have half of the calls name a model that exists, and let no call take long."""
    for named in (case.path_parameters, case.body):
        if isinstance(named, dict) and "model" in named:
            if chance.random() < 0.5:
                named["model"] = "tiny"
            if "/repository/" in case.path and named["model"] == "tiny":
                named["model"] = SPARE
    if case.path == "/v1/channels" and case.method == "POST" and chance.random() < 0.5:
        case.body = {"version": 3, "model": "tiny", "num_slots": 1, "max_tokens": 1}  # few others fit
    if case.path == "/v1/profile":
        if not isinstance(case.body, dict):
            case.body = {}
        seconds = case.body.setdefault("seconds", 0.01)
        if isinstance(seconds, int | float) and 0.01 < seconds <= 60:
            case.body["seconds"] = 0.01


def call(client: httpx.Client, case: Any) -> int:
    """The status of a call, which may be refused, but by none of our mistakes."""
    sent = case.as_transport_kwargs(base_url=str(client.base_url))
    headers = {
        **{name: value.encode("latin-1") for name, value in dict(sent["headers"]).items()},
        **{name: value.encode() for name, value in bearer(key_for(sent["method"], case.path)).items()},
    }
    body = {"content": sent["data"]} if "data" in sent else {"json": sent["json"]} if "json" in sent else {}
    answer = client.request(sent["method"], sent["url"], headers=headers, **body)
    SENT["cases"] += 1
    check(answer, sent)
    return answer.status_code


def check(answer: httpx.Response, sent: Any) -> None:
    assert answer.status_code < 500 or answer.status_code == 503, (sent, answer.text)
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        assert list(answer.json()) == ["error"], (sent, answer.text)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_call_makes_the_server_fail(server: ServerProcess, mode: GenerationMode) -> None:
    statuses: dict[str, Counter[int]] = {}
    chance = random.Random(0)
    with httpx.Client(base_url=f"http://{server.url}", timeout=60, verify=False) as client:
        for operation in operations(client):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # any text is a right path, and Hypothesis would look for a wrong one for long
            found = statuses.setdefault(f"{operation.method.upper()} {operation.path}", Counter())
            is_long = operation.path == "/v1/profile" or "/repository/models/" in operation.path

            @settings(run, max_examples=min(EXAMPLES, FEW) if is_long else EXAMPLES)
            @given(case=operation.as_strategy(generation_mode=mode))
            def called(case: Any) -> None:
                prepare(case, chance)
                found[call(client, case)] += 1  # noqa: B023

            try:
                called()
            except Unsatisfiable:  # without parameters, nothing can be wrong
                assert mode is GenerationMode.NEGATIVE
        assert client.get("/v2/health/ready").status_code == 200
    assert {name for name, found in statuses.items() if found[403]} == set(), "with a key that may not"
    if mode is GenerationMode.POSITIVE:
        for name in SERVED:
            assert statuses[name][200] or statuses[name][201], (name, statuses[name])
    assert any(found[400] for found in statuses.values())
    assert "Traceback" not in server.log()


def test_no_viewer_makes_the_server_fail(server: ServerProcess) -> None:
    """Of events, which the document does not describe."""
    found: Counter[int] = Counter()
    with httpx.Client(base_url=f"http://{server.url}", timeout=60, verify=False) as client:

        @settings(run, max_examples=FEW)
        @example(model="tiny", events="1")
        @given(model=text(), events=one_of(just("1"), text(max_size=3)))
        def called(model: str, events: str) -> None:
            if events.isdecimal():
                events = "1"  # one is sent at once, others after a second each
            query = {"model": model, "events": events}
            answer = client.get("/v1/live", params=query, headers=bearer(key_for("GET", "/v1/live")))
            SENT["cases"] += 1
            check(answer, query)
            found[answer.status_code] += 1

        called()
    assert found[200]
    assert found[400]
    assert not found[403]
    assert "Traceback" not in server.log()
