"""Calls that the OpenAPI document describes, and some that it does not, to a server with everything on."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

from tests.fuzz.mutations import CASES
from tests.service.apps import tiny_settings
from tests.service.keys import all_keys, bearer
from tests.service.processes import ServerProcess, server_process

pytestmark = pytest.mark.slow

EXAMPLES = max(10, CASES // 100)  # of each operation and mode
RIGHTS = {"/metrics": "metrics", "/v1/partitions": "admin", "/v1/placement": "admin", "/v1/log": "admin"}
run = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    everything: dict[str, Any] = {
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


def call(client: httpx.Client, statuses: set[int], case: Any) -> None:
    """Make a call, which may be refused, but by none of our mistakes."""
    sent = case.as_transport_kwargs(base_url=str(client.base_url))
    headers = {
        **{name: value.encode("latin-1") for name, value in dict(sent["headers"]).items()},
        **{name: value.encode() for name, value in bearer(RIGHTS.get(case.path, "infer")).items()},
    }
    body = {"content": sent["data"]} if "data" in sent else {"json": sent["json"]} if "json" in sent else {}
    answer = client.request(sent["method"], sent["url"], headers=headers, **body)
    statuses.add(answer.status_code)
    assert answer.status_code < 500 or answer.status_code == 503, (sent, answer.text)
    if answer.status_code >= 400 and sent["method"] != "HEAD":
        assert list(answer.json()) == ["error"], (sent, answer.text)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_call_makes_the_server_fail(server: ServerProcess, mode: GenerationMode) -> None:
    statuses: set[int] = set()
    names = set()
    with httpx.Client(base_url=f"http://{server.url}", timeout=60) as client:
        for operation in operations(client):
            if operation.path == "/v1/profile":  # it takes the seconds that it is asked to
                continue

            @run
            @given(case=operation.as_strategy(generation_mode=mode))
            def called(case: Any) -> None:
                call(client, statuses, case)

            try:
                called()
                names.add(operation.path)
            except Unsatisfiable:  # without parameters, nothing can be wrong
                assert mode is GenerationMode.NEGATIVE
        assert client.get("/v2/health/ready").status_code == 200
    assert "/v2/models/{model}/infer" in names
    assert "/v1/channels" in names
    assert 400 in statuses
    assert "Traceback" not in server.log()
