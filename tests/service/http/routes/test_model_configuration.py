"""A model's configuration in Triton's form."""

import httpx

from expertd.service.http.app import ExpertApp
from tests.service.apps import HIDDEN, MODEL, TOP_K, serving, tiny_settings


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
    assert {name: config[name] for name in ("name", "platform", "backend", "max_batch_size")} == {
        "name": "tiny",
        "platform": "expertd",
        "backend": "expertd",
        "max_batch_size": 0,
    }
    assert config["instance_group"] == [{"name": "tiny", "kind": "KIND_CPU", "count": 1}]
    assert config["dynamic_batching"] == {"max_queue_delay_microseconds": 0}
    assert config["parameters"]["max_request_tokens"] == {"string_value": "64"}
    assert config["parameters"]["num_experts"] == {"string_value": "4"}
    assert config["parameters"]["hidden_states_datatypes"] == {"string_value": "BF16,FP16,FP32,FP8,UINT8"}
    assert config["parameters"]["topk_ids_datatypes"] == {"string_value": "INT32,INT64"}
    fp8 = {"fp8_format": "e4m3", "fp8_scale": "hidden_states_scale", "fp8_scale_columns": "128"}
    for name, value in fp8.items():
        assert config["parameters"][name] == {"string_value": value}


async def test_it_is_there_while_the_model_is_loading() -> None:
    app = ExpertApp(tiny_settings())  # not started
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        config = (await http.get("/v2/models/tiny/config")).json()
        assert config["instance_group"] == [{"name": "tiny", "kind": "KIND_AUTO", "count": 1}]
        metadata = (await http.get("/v2/models/tiny")).json()
        for tensor, configured in zip(metadata["inputs"], config["input"], strict=True):
            assert (tensor["name"], tensor["shape"]) == (configured["name"], configured["dims"])
        extensions = (await http.get("/v2")).json()["extensions"]
        assert {"statistics", "model_configuration"} <= set(extensions)
