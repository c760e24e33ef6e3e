"""Models that are loaded and unloaded while the server serves."""

import asyncio
import gc
import mmap
import re
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.device.cpu import CpuDevice
from expertd.service.engine import local_models
from expertd.service.engine.errors import ModelUnloadedError, NotReadyError
from expertd.service.engine.layers import Cancelled
from expertd.service.engine.loading import LoadedLayers, Loader, load
from expertd.service.engine.steps import Runner
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings
from tests.service.apps import (
    MODEL,
    Serving,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.checkpoints.encoders import bf16
from tests.service.checkpoints.layouts import write
from tests.service.competing import HeldRunner
from tests.service.http.page.test_live import live
from tests.service.runners import EchoRunner
from tests.service.waiting import until

OTHER = {**MODEL, "name": "other", "weights": {"seed": 7}}


@asynccontextmanager
async def two_models(loader: Loader = load, **changes: Any) -> AsyncIterator[Serving]:
    """A server with the model tiny, and another one that is not loaded at start-up."""
    settings = tiny_settings(models=[MODEL, {**OTHER, "load": False}], **changes)
    async with serving(settings, loader) as server:
        yield server


async def change(server: Serving, what: str, model: str = "other", content: bytes = b"{}") -> Any:
    return await server.http.post(f"/v2/repository/models/{model}/{what}", content=content)


def assert_close(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Up to rounding, which depends on what else is in a step: on some CPUs, the router's GEMM does."""
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-3)


async def infer(server: Serving, model: str, seed: int = 0) -> Any:
    body, length = hidden_request(rows(3, seed))
    headers = {"Inference-Header-Content-Length": str(length)}
    return await server.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)


async def states(server: Serving) -> dict[str, tuple[str, str]]:
    index = (await server.http.post("/v2/repository/index")).json()
    return {entry["name"]: (entry["state"], entry["reason"]) for entry in index}


async def shown_ready(server: Serving) -> dict[str, float]:
    """The series of expertd_model_ready, by model."""
    text = (await server.http.get("/metrics")).text
    found = re.findall(r'^expertd_model_ready{model="(\w+)"} (\S+)$', text, re.M)
    return {model: float(value) for model, value in found}


async def test_a_model_is_loaded_and_unloaded() -> None:
    async with serving(tiny_settings(models=[MODEL, OTHER])) as server:
        expected = output_of(await infer(server, "other"))
    async with two_models() as server:
        assert "model_repository" in (await server.http.get("/v2")).json()["extensions"]
        assert await states(server) == {"tiny": ("READY", ""), "other": ("UNAVAILABLE", "unloaded")}
        for _ in range(2):  # the second time there is nothing to do
            loaded = await change(server, "load")
            assert (loaded.status_code, loaded.json()) == (200, {"name": "other", "state": "READY"})
        assert await states(server) == {"tiny": ("READY", ""), "other": ("READY", "")}
        assert (output_of(await infer(server, "other")) == expected).all()
        for _ in range(2):
            unloaded = await change(server, "unload", content=b'{"parameters":{"unload_dependents":false}}')
            assert (unloaded.status_code, unloaded.json()) == (200, {"name": "other", "state": "UNAVAILABLE"})
        assert (await states(server))["other"] == ("UNAVAILABLE", "unloaded")
        assert (await change(server, "load")).status_code == 200
        assert (output_of(await infer(server, "other")) == expected).all()
        assert output_of(await infer(server, "tiny")).shape == (3, 128)
        described = [(await server.http.get(f"/v2/models/{name}")).json() for name in ("tiny", "other")]
        assert len({model["parameters"]["weights_id"] for model in described}) == 2


async def test_an_unloaded_model_is_not_there_and_the_server_is_ready_without_it() -> None:
    async with two_models() as server:
        text = "model other: expected a loaded one, got it unloaded"
        assert error_of(await infer(server, "other"), 404) == text
        for path in ("", "/config", "/versions/1", "/versions/1/config"):
            assert error_of(await server.http.get(f"/v2/models/other{path}"), 404) == text
        ready = await server.http.get("/v2/models/other/ready")
        assert error_of(ready, 503) == "model other: unloaded"
        assert (await server.http.get("/v2/health/ready")).status_code == 200
        assert (await server.http.get("/v2/models/other/stats")).status_code == 200
        only_ready = (await server.http.post("/v2/repository/index", content=b'{"ready": true}')).json()
        assert [entry["name"] for entry in only_ready] == ["tiny"]
        assert (await shown_ready(server)) == {"tiny": 1}, "no alert for what is unloaded on purpose"
        assert (await live(server))["models"]["other"]["unloaded"]
        assert not (await live(server))["models"]["tiny"]["unloaded"]
        assert server.metric("refusals_total", model="other", reason="unknown_model") == 1
        assert (await server.http.get("/metrics")).status_code == 200
        await change(server, "load")
        assert (await shown_ready(server)) == {"tiny": 1, "other": 1}
        await change(server, "unload")
        await change(server, "unload", "tiny")
        assert (await shown_ready(server)) == {}
        assert (await server.http.get("/v2/health/ready")).status_code == 200, "no model is expected"
        assert (await server.http.get("/metrics")).status_code == 200


WRONG: list[tuple[str, bytes, int, str]] = [
    ("none/load", b"{}", 404, "model: expected tiny or other, got 'none'"),
    ("none/unload", b"", 404, "model: expected tiny or other, got 'none'"),
    ("..%2F..%2Fetc/load", b"", 404, "model: expected tiny or other, got '"),
    ("%2Fetc%2Fpasswd/load", b"", 404, "model: expected tiny or other, got '"),
    ("other/load", b"{", 400, "body: expected JSON, got invalid JSON: "),
    ("other/load", b"[1]", 400, "body: expected an object, got [1]"),
    (
        "other/load",
        b"1" * 5000,
        400,
        "body: expected integers of at most 4300 digits in JSON, got a longer one",
    ),
    *(
        (f"other/{what}", b'{"parameters": %s}' % value, 400, "parameters: expected an object, got ")
        for what in ("load", "unload")
        for value in (b"1", b"[]", b'""', b"0", b"false")
    ),
    *(
        (
            "other/load",
            b'{"parameters": {"%s": "AA=="}}' % name.encode(),
            400,
            f"parameters: expected none, since models are loaded as configured, got {name}",
        )
        for name in ("config", "file:1/model")
    ),
    ("other/unload", b'{"parameters": {"x": 1}}', 400, "parameters: expected only unload_dependents"),
    (
        "other/unload",
        b'{"parameters": {"unload_dependents": 1}}',
        400,
        "parameter unload_dependents: expected true or false, got 1",
    ),
]
WRONG_INDEX = [
    (b'{"ready": "x"}', "ready: expected true or false, got 'x'"),
    (b'{"ready": NaN}', "body: expected finite numbers in JSON, got NaN"),
    (b"[]", 'body: expected {"ready": true or false}, got []'),
]


async def test_wrong_calls_are_refused() -> None:
    async with two_models() as server:
        for path, content, status, text in WRONG:
            answer = await server.http.post(f"/v2/repository/models/{path}", content=content)
            assert error_of(answer, status).startswith(text)
            assert (await states(server))["other"] == ("UNAVAILABLE", "unloaded")
        for content, text in WRONG_INDEX:
            assert error_of(await server.http.post("/v2/repository/index", content=content), 400) == text


async def test_a_model_without_memory_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_models() as server:
        monkeypatch.setattr(CpuDevice, "free_bytes", lambda _: 100_000)
        refused = await change(server, "load")
        text = error_of(refused, 409)
        assert text.startswith(
            "model other: expected 0.9 MB (weights 0.4, steps 0.5, graphs 0.0) of free memory"
        )
        assert text.endswith("got 0.1 MB")
        assert (await states(server))["other"] == ("UNAVAILABLE", "unloaded")
        monkeypatch.undo()
        assert (await change(server, "load")).status_code == 200


async def test_a_file_that_cannot_be_read_is_a_failure_whose_reason_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "missing.safetensors"
    settings = tiny_settings(models=[MODEL, {**OTHER, "load": False, "weights": {"path": str(path)}}])
    async with serving(settings) as server:
        text = error_of(await change(server, "load"), 500)
        assert text == "model other: loading failed: see the server's log"
        assert f"{path}: cannot be read: No such file or directory" in caplog.text
        assert (await states(server))["other"] == ("UNAVAILABLE", "loading failed")
        assert (await shown_ready(server))["other"] == 0
        assert (await change(server, "unload")).status_code == 200
        assert "other" not in await shown_ready(server), "the alert ends"
        assert output_of(await infer(server, "tiny")).shape == (3, 128)


async def test_a_layer_that_fails_its_first_step_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[weakref.ref[Any]] = []

    def fail(runner: Any, *_: object) -> None:
        layers.append(weakref.ref(runner.layer.weights.gate_up.data))
        raise ValueError("no such step")  # whose traceback is not logged, and so not kept by pytest

    def is_freed() -> bool:
        gc.collect()
        return layers[0]() is None

    async with two_models() as server:
        monkeypatch.setattr(local_models, "_first_steps", fail)
        error_of(await change(server, "load"), 500)
        await until(is_freed, 10)  # the thread's traceback may hold it for a moment
        monkeypatch.undo()
        assert (await change(server, "load")).status_code == 200


async def test_a_checkpoint_layer_is_loaded_at_run_time(tmp_path: Path) -> None:
    write(tmp_path / "mixtral", bf16, quantization=None)
    checkpoint = {"path": str(tmp_path / "mixtral"), "layers": "0", "load": False}
    settings = resolve_checkpoints(tiny_settings(checkpoints=[checkpoint]))
    async with serving(settings) as server:
        assert (await states(server))["mixtral.layers.0"] == ("UNAVAILABLE", "unloaded")
        assert (await change(server, "load", "mixtral.layers.0")).status_code == 200
        metadata = (await server.http.get("/v2/models/mixtral.layers.0")).json()
        assert metadata["name"] == "mixtral.layers.0"


async def test_unloading_frees_the_layer() -> None:
    async with two_models() as server:
        assert server.app.engine.loaded is not None
        for _ in range(2):
            await change(server, "load")
            await infer(server, "other")
            runner: Any = server.app.engine.loaded.runners["other"]
            weights = weakref.ref(runner.layer.weights.gate_up.data)
            del runner
            await change(server, "unload")
            gc.collect()
            assert weights() is None
            assert list(server.app.engine.loaded.runners) == ["tiny"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


async def test_unloading_returns_memory_to_the_system() -> None:
    large = {**OTHER, "hidden_size": 1024, "intermediate_size": 512, "num_experts": 16, "load": False}
    async with serving(tiny_settings(models=[MODEL, large])) as server:
        await change(server, "load")  # loads what any layer needs, too
        weights = 3 * 16 * 1024 * 512 * 2  # in bf16
        for _ in range(5):  # memory of earlier tests may be used again, and need not come from the system
            loaded = resident_bytes()
            await change(server, "unload")
            unloaded = resident_bytes()
            if loaded - unloaded > weights / 2:
                return
            await change(server, "load")
        raise AssertionError(f"expected unloading to return {weights} bytes, got {loaded - unloaded}")


def holding(held: list[HeldRunner]) -> Loader:
    """Loads as a server does; the steps of a later model can be held."""

    def load_held(settings: Settings, cancelled: Cancelled) -> LoadedLayers:
        loaded = load(settings, cancelled)
        models: Any = loaded.models
        add = models.add

        def added(model: ModelSettings, layer: Any) -> Runner:
            held.append(HeldRunner(add(model, layer)))
            return held[-1]

        models.add = added
        return loaded

    return load_held


async def test_unloading_answers_what_was_accepted_and_refuses_what_comes_later() -> None:
    held: list[HeldRunner] = []
    async with two_models(holding(held)) as server:
        await change(server, "load")
        (runner,) = held
        runner.close()
        begun = asyncio.create_task(infer(server, "other", 0))
        await until(lambda: bool(runner.steps))
        queued = [asyncio.create_task(infer(server, "other", seed)) for seed in (1, 2)]
        await until(lambda: server.app.engine.executor.waiting("other")[0] == 2)
        unloading = asyncio.create_task(change(server, "unload"))
        await until(lambda: server.app.engine.repository.state("other").state == "UNLOADING")
        text = error_of(await infer(server, "other"), 404)
        assert text == "model other: expected a loaded one, got it unloading"
        with pytest.raises(ModelUnloadedError, match=text):
            server.app.engine.executor.check_capacity("other", 1, 0)
        assert not unloading.done()
        runner.open()
        outputs = [output_of(response) for response in await asyncio.gather(begun, *queued)]
        assert (await unloading).status_code == 200
        await change(server, "load")
        for seed, output in enumerate(outputs):
            assert_close(output_of(await infer(server, "other", seed)), output)


async def test_a_request_whose_model_is_unloaded_while_its_body_arrives_is_refused() -> None:
    async with two_models() as server:
        await change(server, "load")
        body, length = hidden_request(rows(2))

        async def content() -> AsyncIterator[bytes]:
            yield body[:10]
            await change(server, "unload")
            yield body[10:]

        headers = {"Inference-Header-Content-Length": str(length)}
        response = await server.http.post("/v2/models/other/infer", content=content(), headers=headers)
        assert error_of(response, 404) == "model other: expected a loaded one, got it unloaded"


async def test_others_are_served_while_models_come_and_go() -> None:
    async with two_models() as server:
        expected = [output_of(await infer(server, "tiny", seed)) for seed in range(4)]
        await change(server, "load")
        others = [output_of(await infer(server, "other", seed)) for seed in range(4)]
        ended = asyncio.Event()
        counts = {"tiny": 0, "other": 0, "refused": 0}

        async def ask(model: str, outputs: list[Any]) -> None:
            seed = 0
            while not ended.is_set():
                seed = (seed + 1) % len(outputs)
                response = await infer(server, model, seed)
                if model == "other" and response.status_code in (404, 503):  # unloaded, loading
                    counts["refused"] += 1
                    await asyncio.sleep(0)  # such an answer waits for nothing
                    continue
                assert_close(output_of(response), outputs[seed])
                counts[model] += 1

        callers = [asyncio.create_task(ask("tiny", expected)) for _ in range(4)]
        callers += [asyncio.create_task(ask("other", others)) for _ in range(4)]
        for _ in range(4):
            assert (await change(server, "unload")).status_code == 200
            assert (await change(server, "load")).status_code == 200
            counts["tiny"] = counts["other"] = 0
            await until(lambda: min(counts["tiny"], counts["other"]) > 0)
        ended.set()
        await asyncio.gather(*callers)
        assert counts["refused"] > 0


async def test_calls_at_the_same_time_come_one_after_another() -> None:
    async with two_models() as server:
        calls = [change(server, what) for what in ("load", "load", "unload", "load", "unload", "unload")]
        responses = await asyncio.gather(*calls)
        assert [response.status_code for response in responses] == [200] * 6
        assert (await states(server))["other"] == ("UNAVAILABLE", "unloaded")


def reading(until_cancelled: Callable[[Cancelled], None]) -> Loader:
    """Loads as a server does; but a later model is read by `until_cancelled`."""

    def load_slowly(settings: Settings, cancelled: Cancelled) -> LoadedLayers:
        loaded = load(settings, cancelled)
        models: Any = loaded.models
        read = models.read

        def slowly(model: ModelSettings, is_cancelled: Cancelled) -> Any:
            until_cancelled(is_cancelled)
            return read(model, is_cancelled)

        models.read = slowly
        return loaded

    return load_slowly


async def test_a_shutdown_does_not_wait_for_a_model_that_is_being_read() -> None:
    started: list[bool] = []

    def wait(is_cancelled: Cancelled) -> None:
        started.append(True)
        while not is_cancelled():
            pass

    async with two_models(reading(wait)) as server:
        loading = asyncio.create_task(change(server, "load"))
        await until(lambda: bool(started))
        assert (await states(server))["other"] == ("LOADING", "")
        text = "model other is not ready: it is loading"
        assert error_of(await infer(server, "other"), 503) == text
        assert server.metric("refusals_total", model="other", reason="not_ready") == 1
        assert error_of(await server.http.get("/v2/models/other"), 503) == text
        with pytest.raises(NotReadyError, match=text):  # as of a channel
            server.app.engine.executor.check_capacity("other", 1, 0)
        assert output_of(await infer(server, "tiny")).shape == (3, 128)
        assert await server.app.engine.drain()
        assert error_of(await loading, 503) == "the server is shutting down"


async def test_a_server_of_several_ranks_or_one_that_is_loading_refuses() -> None:
    with pytest.raises(ValueError, match=r"models\.0\.load: expected true with several ranks, got false"):
        tiny_settings(models=[{**MODEL, "load": False}], ranks=2)
    async with two_models(serving_runner(EchoRunner()), ranks=1) as server:
        text = error_of(await change(server, "load"), 409)
        assert text.startswith("repository: expected a server of one rank without lanes to load")
        engine = server.app.engine
        engine.repository._loaded = None
        assert error_of(await change(server, "load"), 503) == "the server is loading"
        with pytest.raises(ModelUnloadedError):
            engine.check_loaded("other")


async def test_what_steps_of_unloaded_models_have_used_still_counts() -> None:
    """A counter that falls looks like a new process."""

    def counters() -> tuple[float, ...]:
        steps = server.metric("steps_total", model="other", launch="host")
        return steps, server.metric("host_copy_bytes_total")

    async with two_models() as server:
        assert (await change(server, "load")).status_code == 200
        output_of(await infer(server, "other"))
        before = counters()
        assert all(before)
        for what, model in (("unload", "other"), ("unload", "tiny"), ("load", "other")):
            assert (await change(server, what, model)).status_code == 200
            assert counters() == before if what == "unload" else counters()[0] >= before[0]
        output_of(await infer(server, "other"))
        assert counters()[0] > before[0]
