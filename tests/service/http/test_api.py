"""The whole API in process, with a tiny real layer."""

import asyncio
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import expertd_client
from expertd import __version__
from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.engine.layers import weights_ids
from expertd.service.http.app import ExpertApp
from expertd.service.settings.model import Settings
from tests.kernels.helpers import diff, fresh_generator
from tests.service.apps import (
    HIDDEN,
    MODEL,
    NUM_EXPERTS,
    TOP_K,
    binary_request,
    error_of,
    hidden_request,
    json_input,
    json_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.checkpoints.builders import Checkpoint
from tests.service.checkpoints.layouts import write
from tests.service.keys import all_keys, key_of
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, Answer, connect, head, infer, read_answer, read_to_end

GOOD = hidden_request(rows(3))


async def test_metadata_health_and_index() -> None:
    async with serving(tiny_settings()) as server:
        about = (await server.http.get("/v2")).json()
        assert about["name"] == "expertd"
        assert about["parameters"] == {"client_versions": "0.1", "instance": server.app.engine.instance}
        assert (await server.http.get("/v2/health/live")).json() == {"live": True}
        assert (await server.http.get("/v2/health/ready")).json() == {"ready": True}
        for path in ("/v2/models/tiny", "/v2/models/tiny/versions/1"):
            metadata = (await server.http.get(path)).json()
            hidden = {"name": "hidden_states", "datatype": "FP32", "shape": [-1, HIDDEN]}
            fp8 = {"fp8_format": "e4m3", "fp8_scale": "hidden_states_scale", "fp8_scale_columns": 128}
            parameters = {"datatypes": "BF16,FP16,FP32,FP8,UINT8", **fp8}
            assert metadata["inputs"][0] == {**hidden, "parameters": parameters}
            assert metadata["inputs"][1]["parameters"] == {"datatypes": "INT32,INT64"}
            assert metadata["outputs"] == [hidden]
            assert [tensor["shape"] for tensor in metadata["inputs"][1:]] == [[-1, 2], [-1, 2]]
            assert (await server.http.get(f"{path}/ready")).json() == {"name": "tiny", "ready": True}
        for body in (b"", b'{"ready": true}', b'{"ready": false}'):
            index = (await server.http.post("/v2/repository/index", content=body)).json()
            assert index == [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}]


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, "none"),
        ({"num_shared_experts": 2}, "included"),
        ({"num_shared_experts": 2, "shared_experts": False}, "excluded"),
        ({"routing": {"scoring_func": "sigmoid"}, "local_experts": "1-2"}, "none"),
    ],
)
async def test_a_model_says_what_its_layer_computes(changes: dict[str, Any], shared: str) -> None:
    model = {**MODEL, **changes}
    expected = {
        "num_experts": NUM_EXPERTS,
        "num_shared_experts": changes.get("num_shared_experts", 0),
        "shared_experts": shared,
        "scoring_func": changes.get("routing", {}).get("scoring_func", "softmax"),
        "activation": "silu(gate) * up",
        "weight_format": "FP8",
        "max_request_tokens": 64,
        **({"local_experts": "1-2"} if "local_experts" in changes else {}),
    }
    async with serving(tiny_settings(models=[model])) as server:
        parameters = (await server.http.get("/v2/models/tiny")).json()["parameters"]
        (weights_id,) = weights_ids(server.app.engine.settings.models).values()
        assert parameters == expected | {"weights_id": weights_id}
        configured = (await server.http.get("/v2/models/tiny/config")).json()["parameters"]
        assert {name: configured[name]["string_value"] for name in parameters} == {
            name: str(value) for name, value in parameters.items()
        }
    app = ExpertApp(tiny_settings(models=[model]))  # not started
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert (await http.get("/v2/models/tiny")).json()["parameters"] == expected


@pytest.mark.parametrize(("encoding", "form"), [("mxfp4", "MXFP4"), ("int4", "INT4"), ("nvfp4", "NVFP4")])
async def test_a_checkpoint_of_four_bits_is_served_and_says_so(
    encoding: str, form: str, tmp_path: Path
) -> None:
    gate_up, down = write(tmp_path / "four", encoding)
    checkpoint = {"path": tmp_path / "four", "datatype": "FP32"}
    settings = {"backend": "reference", "checkpoints": [checkpoint]}
    x = torch.randn(5, 256, generator=fresh_generator())
    async with serving(resolve_checkpoints(Settings.model_validate(settings))) as server:
        path = "/v2/models/four.layers.0"
        assert (await server.http.get(path)).json()["parameters"]["weight_format"] == form
        ids = torch.tensor([[0], [1], [2], [3], [0]])
        body = json_request(
            json_input(x.numpy()),
            json_input(ids.numpy(), "topk_ids", "INT32"),
            json_input(np.ones((5, 1), np.float32), "topk_weights"),
        )
        got = torch.from_numpy(output_of(await server.http.post(f"{path}/infer", content=body)))
    for row, expert in enumerate(ids.flatten().tolist()):
        gate, up = (gate_up[expert] @ x[row]).chunk(2)
        assert diff(got[row], down[expert] @ (torch.nn.functional.silu(gate) * up)) < 2e-4


@pytest.mark.slow
@pytest.mark.thorough  # the families' activations have tests of their own
async def test_the_activation_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    directory = Checkpoint("hunyuan-4", tmp_path / "model").directory
    checkpoint = {"path": directory, "layers": "1", "shared_experts": False}
    settings = resolve_checkpoints(Settings.model_validate({"checkpoints": [checkpoint]}))
    async with serving(settings, serving_runner(EchoRunner())) as server:
        model = next(iter(server.app.engine.models))
        parameters = (await server.http.get(f"/v2/models/{model}")).json()["parameters"]
    assert parameters["activation"] == "silu(min(gate, 0.7)) * clamp(up, 0.7)"
    assert (parameters["shared_experts"], parameters["scoring_func"]) == ("excluded", "sigmoid")


VERSIONS: dict[str | None, bool] = {
    None: True,  # another kind of client
    expertd_client.__version__: True,
    "0.1.7": True,
    "0.1.0.dev3": True,
    **dict.fromkeys(("0.1", "0.10.0", "0.2.0", "1.0.0", "", "\xe9"), False),
}


async def test_clients_of_other_versions_are_refused() -> None:
    body, length = GOOD
    calls: list[tuple[str, str, Any, int]] = [
        ("GET", "/v2", None, 200),
        ("GET", "/v2/health/ready", None, 200),
        ("GET", "/v2/models/tiny", None, 200),
        ("POST", "/v1/channels", b"{}", 403),
        ("POST", "/v2/models/tiny/infer", body, 200),
    ]
    async with serving(tiny_settings(), serving_runner(EchoRunner())) as server:
        for version, accepted in VERSIONS.items():
            headers = [] if version is None else [(b"Expertd-Client", version.encode("latin-1"))]
            text = f"expertd-client: expected version 0.1.x with expertd {__version__}, got {version!a}"
            for method, path, content, status in calls:
                size = [(b"Inference-Header-Content-Length", str(length).encode())] * (content == body)
                answer = await server.http.request(method, path, content=content, headers=[*headers, *size])
                assert accepted or error_of(answer, 400) == text
                assert not accepted or answer.status_code == status


async def test_head_is_get_without_a_body() -> None:
    async with serving(tiny_settings()) as server:
        for path in (
            *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny", "/v2/models/tiny/ready"),
            *(
                "/v2/models/tiny/versions/1/ready",
                "/v2/models/other",
                "/v1/partitions",
                "/openapi.json",
                "/docs",
            ),
        ):
            get, head = await server.http.get(path), await server.http.head(path)
            assert (head.status_code, head.headers) == (get.status_code, get.headers)
            assert int(head.headers["content-length"]) == len(get.content) > 0
            assert head.content == b""
        assert (await server.http.head("/metrics")).status_code == 200
        refused = await server.http.head("/v2/models/tiny/infer")
        assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")


async def test_head_reports_whether_the_server_is_ready() -> None:
    async with serving(tiny_settings()) as server:
        server.app.engine.begin_drain()
        assert (await server.http.head("/v2/health/live")).status_code == 200
        for path in ("/v2/health/ready", "/v2/models/tiny/ready"):
            assert (await server.http.head(path)).status_code == 503


OPEN = ("/", "*", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready", "/page/main.js")
OPTIONS = dict.fromkeys((*OPEN, "/v2/models/tiny/versions/1/ready"), "GET, HEAD, OPTIONS")
OPTIONS_WITH_KEY = {
    "/v1/channels": "GET, HEAD, OPTIONS, POST",
    "/v1/live": "GET, HEAD, OPTIONS",
    "/v1/channels/1": "DELETE, GET, HEAD, OPTIONS",
    "/v2/models/tiny/infer": "OPTIONS, POST",
    "/openapi.json": "GET, HEAD, OPTIONS",
}


async def test_options_tell_the_methods_and_check_health(tmp_path: Path) -> None:
    """Load balancers ask so, as haproxy with a plain `option httpchk`, without Host or a key."""

    async def asked(path: str, key: str = "") -> Answer:
        with connect(server.port) as sock:
            lines = [f"OPTIONS {path} HTTP/1.0", *([f"Authorization: Bearer {key_of(key)}"] if key else ())]
            sock.sendall("\r\n".join([*lines, "", ""]).encode())
            (answer,) = await asyncio.to_thread(read_to_end, sock)
            return answer

    settings = tiny_settings(keys=all_keys(tmp_path / "keys.yaml"))
    async with serving(settings) as server:
        for path, methods in (OPTIONS | OPTIONS_WITH_KEY).items():
            right = "" if path in OPTIONS else "metrics" if path == "/v1/live" else "infer"
            answer = await asked(path, right)
            told = answer.status, answer.headers.get("allow"), answer.body
            assert told == (200, methods.lower(), b""), path
        assert {(await asked(path)).status for path in OPTIONS_WITH_KEY} == {401}
        assert (await asked("/v1/live", "infer")).status == 403
        for path, status in (("/v2/models/other/ready", 404), ("/v2/models/tiny/versions/2/ready", 404)):
            assert (await asked(path)).status == status
        server.app.engine.begin_drain()
        statuses = {path: (await asked(path)).status for path in OPTIONS}
    ready = dict.fromkeys((path for path in OPTIONS if "ready" in path or path in "/*"), 503)
    assert statuses == {**dict.fromkeys(OPTIONS, 200), **ready}


async def test_options_of_the_root_check_health_without_a_page() -> None:
    async with serving(tiny_settings(page={"enabled": False})) as server:
        answer = await server.http.options("/")
        assert (answer.status_code, answer.headers["allow"]) == (200, "OPTIONS")
        server.app.engine.begin_drain()
        assert error_of(await server.http.options("/"), 503) == "the server is draining"
        for path in ("/", "/page/main.js", "/v1/live"):
            assert error_of(await server.http.get(path), 404).startswith("path: expected one of this API")


@pytest.mark.parametrize("request_id", ["", "42", 'ä\n"\u20ac', "x" * 1000])
@pytest.mark.parametrize("is_binary", [True, False])
async def test_a_response_has_what_the_protocol_says(request_id: str, is_binary: bool) -> None:
    """id, model_name and model_version; the requested output; parameters of all kinds may be there."""
    free = {"a": "text", "b": 1.5, "c": True, "layer_id": 7}
    output = {"name": "hidden_states", "parameters": {"binary_data": is_binary, **free}}
    tensor = {**json_input(rows(2)), "parameters": free}
    async with serving(tiny_settings()) as server:
        expected = output_of(await server.infer(*hidden_request(rows(2))))
        for outputs in ([output], [], None):
            more = {} if outputs is None else {"outputs": outputs}
            body = json_request(tensor, id=request_id, parameters=free, **more)
            response = await server.http.post("/v2/models/tiny/versions/1/infer", content=body)
            length = response.headers.get("inference-header-content-length")
            assert (length is not None) == (is_binary and outputs == [output])
            kind = "application/json" if length is None else "application/octet-stream"
            assert response.headers["content-type"] == kind
            header = json.loads(response.content[: int(length)] if length else response.content)
            assert (header["id"], header["model_name"], header["model_version"]) == (request_id, "tiny", "1")
            assert [each["name"] for each in header["outputs"]] == ["hidden_states"]
            assert np.array_equal(output_of(response), expected)
        assert np.array_equal(output_of(await server.infer(rows(2).tobytes(), 0)), expected), "raw rows"


async def test_zero_tokens_give_zero_rows() -> None:
    async with serving(tiny_settings()) as server:
        assert output_of(await server.infer(*hidden_request(rows(0)))).shape == (0, HIDDEN)
        assert output_of(await server.infer(json_request(json_input(rows(0))))).shape == (0, HIDDEN)
        assert output_of(await server.infer(b"", 0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
async def test_null_beside_binary_tensors_is_absent_however_the_body_comes(num_tokens: int) -> None:
    """As KServe's REST client sends it: `"data": null`."""
    values = rows(num_tokens)
    entry = json_input(values) | {"data": None, "parameters": {"binary_data_size": values.nbytes}}
    output = {"name": "hidden_states", "parameters": {"binary_data": None}}
    nulls = {"binary_data_output": True, "timeout": None, "priority": None}
    header = json_request(entry, id=None, parameters=nulls, outputs=[output])
    body = header + values.tobytes()
    packed, length = gzip.compress(body), f"Inference-Header-Content-Length: {len(header)}"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:50], body[50:]))
    chunked = head(f"POST {INFER} HTTP/1.1", length, "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"
    requests = [infer(body, len(header)), infer(packed, len(header), "Content-Encoding: gzip"), chunked]
    settings = tiny_settings({"max_request_tokens": 300, "max_batch_tokens": 300})
    async with serving(settings, serving_runner(EchoRunner())) as server:
        with connect(server.port) as sock:
            for data in requests * 2:  # the second time, with a kept plan
                await asyncio.to_thread(sock.sendall, data)
                answer = await asyncio.to_thread(read_answer, sock)
                assert answer.status == 200, answer.body
                start = int(answer.headers["inference-header-content-length"])
                assert answer.body[start:] == values.tobytes()


async def test_given_routing_is_used() -> None:
    values = rows(2)
    async with serving(tiny_settings()) as server:

        async def answer(ids: list[list[int]]) -> Any:
            tensors = {
                "hidden_states": ("FP32", [2, HIDDEN], values.tobytes()),
                "topk_ids": ("INT64", [2, 2], np.array(ids, np.int64).tobytes()),
                "topk_weights": ("FP32", [2, 2], np.array([[1, 0], [1, 0]], np.float32).tobytes()),
            }
            parameters = {"binary_data_output": True}
            return output_of(await server.infer(*binary_request(tensors, parameters=parameters)))

        first, same, other = [await answer(2 * [ids]) for ids in ([0, 1], [0, 2], [3, 1])]
    np.testing.assert_array_equal(first, same, err_msg="an expert of weight 0 counts for nothing")
    assert np.abs(first - other).max() > 0.01


@pytest.mark.parametrize(("datatype", "size"), [("BF16", 2), ("FP16", 2), ("FP32", 4)])
async def test_the_output_has_the_inputs_datatype_by_default(datatype: str, size: int) -> None:
    data = bytes(3 * HIDDEN * size)
    tensors = {"hidden_states": (datatype, [3, HIDDEN], data)}
    async with serving(tiny_settings()) as server:
        for requested in (None, "BF16", "FP16", "FP32"):
            output = {"name": "hidden_states", "parameters": {"binary_data": True}}
            if requested:
                output["parameters"] = {"binary_data": True, "datatype": requested}
            response = await server.infer(*binary_request(tensors, outputs=[output]))
            length = int(response.headers["inference-header-content-length"])
            header = json.loads(response.content[:length])["outputs"][0]
            assert header["datatype"] == (requested or datatype)
            expected = 3 * HIDDEN * {"BF16": 2, "FP16": 2, "FP32": 4}[requested or datatype]
            assert len(response.content) - length == header["parameters"]["binary_data_size"] == expected


async def test_requests_and_responses_may_be_compressed() -> None:
    body, length = GOOD
    async with serving(tiny_settings()) as server:
        plain = output_of(await server.infer(body, length))
        for name, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
            response = await server.infer(packed, length, content_encoding=name, accept_encoding=name)
            assert response.headers["content-encoding"] == name
            np.testing.assert_array_equal(output_of(response), plain)
        response = await server.infer(body, length, accept_encoding="gzip, deflate")
        assert "content-encoding" not in response.headers
        response = await server.infer(body, length, content_encoding="br")
        assert error_of(response, 415) == "Content-Encoding: expected gzip, deflate or identity, got 'br'"
        assert response.headers["accept-encoding"] == "gzip, deflate"
        error_of(await server.infer(b"no gzip", 3, content_encoding="gzip"), 400)
        halves = gzip.compress(body[:50]) + gzip.compress(body[50:])
        np.testing.assert_array_equal(
            output_of(await server.infer(halves, length, content_encoding="gzip")), plain
        )
        for one, other in (("gzip", "identity"), ("identity", "gzip")):
            headers = [("Content-Encoding", one), ("Content-Encoding", other)]
            headers.append(("Inference-Header-Content-Length", str(length)))
            response = await server.http.post(
                "/v2/models/tiny/infer", content=gzip.compress(body), headers=headers
            )
            np.testing.assert_array_equal(output_of(response), plain)
        error_of(await server.infer(gzip.compress(bytes(2 << 20)), 3, content_encoding="gzip"), 413)
        output_of(await server.infer(body, length))


async def test_nan_affects_only_its_own_request() -> None:
    broken = rows(4, seed=1)
    broken[2, 7] = np.nan
    async with serving(tiny_settings()) as server:
        alone = output_of(await server.infer(*hidden_request(rows(4))))
        answers = await asyncio.gather(
            *(server.infer(*hidden_request(broken if i % 2 else rows(4))) for i in range(16))
        )
        for i, response in enumerate(answers):
            if i % 2:
                assert np.isnan(output_of(response)[2]).any()
                assert np.isfinite(output_of(response)[[0, 1, 3]]).all()
            else:
                np.testing.assert_allclose(output_of(response), alone, rtol=0.02, atol=0.02)
        body, length = hidden_request(broken, parameters={"binary_data_output": False})
        text = error_of(await server.infer(body, length), 400)
        assert "not finite" in text, "JSON cannot represent NaN"


async def test_the_configuration_has_tensors_limits_and_sizes() -> None:
    settings = tiny_settings(models=[{**MODEL, "datatype": "BF16"}])
    async with serving(settings) as server:
        response = await server.http.get("/v2/models/tiny/config")
        versioned = await server.http.get("/v2/models/tiny/versions/1/config")
    config = response.json()
    assert versioned.json() == config
    routing = {"dims": [-1, TOP_K], "optional": True}
    assert config["input"] == [
        {"name": "hidden_states", "data_type": "TYPE_BF16", "dims": [-1, HIDDEN], "optional": False},
        {"name": "topk_ids", "data_type": "TYPE_INT32", **routing},
        {"name": "topk_weights", "data_type": "TYPE_FP32", **routing},
    ]
    assert config["output"] == [{"name": "hidden_states", "data_type": "TYPE_BF16", "dims": [-1, HIDDEN]}]
    fixed = {"name": "tiny", "platform": "expertd", "backend": "expertd", "max_batch_size": 0}
    assert {name: config[name] for name in fixed} == fixed
    assert config["instance_group"] == [{"name": "tiny", "kind": "KIND_CPU", "count": 1}]
    assert config["dynamic_batching"] == {"max_queue_delay_microseconds": 0}
    assert config["parameters"]["max_request_tokens"] == {"string_value": "64"}
    assert config["parameters"]["num_experts"] == {"string_value": "4"}
    assert config["parameters"]["hidden_states_datatypes"] == {"string_value": "BF16,FP16,FP32,FP8,UINT8"}
    assert config["parameters"]["topk_ids_datatypes"] == {"string_value": "INT32,INT64"}
    fp8 = {"fp8_format": "e4m3", "fp8_scale": "hidden_states_scale", "fp8_scale_columns": "128"}
    for name, value in fp8.items():
        assert config["parameters"][name] == {"string_value": value}
