"""Layers that are loaded to a GPU and freed again while others run."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import torch

from expertd.service.engine.loading import load
from expertd.service.moe.request import zero_request
from tests.paths import ROOT
from tests.service.apps import hidden_request, output_of, rows, serving, tiny_settings
from tests.service.engine.repeated_captures import MODEL, OTHER
from tests.service.processes import clean_environment

pytestmark = pytest.mark.gpu


def settings(*models: dict[str, Any]) -> Any:
    return tiny_settings(models=models, backend="hopper")


def test_loading_and_unloading_leaves_nothing_behind() -> None:
    given = settings(MODEL, OTHER)
    loaded = load(given, lambda: False)
    models: Any = loaded.models
    used = []
    for _ in range(8):
        models.check_memory(given.models[1])
        runner: Any = models.add(given.models[1], models.read(given.models[1], lambda: False))
        for tokens in (1, 64, 200, 64):
            runner.run([zero_request(tokens, 2048)])
            loaded.runners["tiny"].begin([zero_request(tokens, 2048)]).finish()
        assert runner._graphs is not None
        del runner
        models.remove("other")
        models.collect()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert len(set(used[-4:])) == 1, "after the first times, which make what all layers share"
    needs = models._needs(given.models[1])
    assert needs.weights >= 32 * 3 * 2048 * 768


def test_a_model_larger_than_the_gpu_is_refused_before_anything_is_allocated() -> None:
    huge = {**OTHER, "num_experts": 1024, "hidden_size": 16384, "intermediate_size": 16384}
    given = settings(MODEL, huge)
    models: Any = load(given, lambda: False).models
    with pytest.raises(MemoryError, match=r"model other: expected \d+\.\d MB \(weights .*\) of free memory"):
        models.check_memory(given.models[1])


async def test_others_are_served_while_a_model_is_loaded() -> None:
    async with serving(settings(MODEL, OTHER)) as server:

        async def infer(model: str) -> Any:
            body, length = hidden_request(wide)
            headers = {"Inference-Header-Content-Length": str(length)}
            response = await server.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
            return output_of(response)

        wide = rows(16).reshape(1, 2048)
        expected = await infer("tiny")
        for _ in range(3):
            loading = asyncio.create_task(server.http.post("/v2/repository/models/other/load"))
            served = 0
            while not loading.done():
                assert (await infer("tiny") == expected).all()
                served += 1
            assert (await loading).status_code == 200
            assert served > 0
            other = await infer("other")
            assert not (other == expected).all()
            assert (await server.http.post("/v2/repository/models/other/unload")).status_code == 200


def test_captures_keep_no_memory() -> None:
    """Neither those of changed partitions nor those of a model that is loaded and unloaded."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.service.engine.repeated_captures"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean_environment(),
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    rounds = [[int(each) for each in line.split()] for line in result.stdout.splitlines()]
    # Others allocate once; a leak grows each time.
    on_host, on_gpu = (min(each) for each in zip(*rounds, strict=True))
    assert on_host < 20 * 4096
    assert on_gpu <= 0
