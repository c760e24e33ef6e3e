"""The page's arithmetic, in a browser, against NumPy and torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser

from expertd.service.engine.metrics.family import SECONDS
from tests.service.apps import serving_runner, tiny_settings
from tests.service.http.page.browser import needs_chromium, visit
from tests.service.http.page.threads import serving_in_thread
from tests.service.runners import EchoRunner

pytestmark = [pytest.mark.slow, pytest.mark.thorough, needs_chromium]


class Modules:
    """The functions that the page's modules export."""

    def __init__(self, page: Any) -> None:
        self._page = page

    def call(self, module: str, name: str, *arguments: Any) -> Any:
        code = "async ([module, name, rest]) => (await import(`/page/${module}.js`))[name](...rest)"
        return self._page.evaluate(code, [module, name, arguments])


@pytest.fixture(scope="module")
def modules(browser: Browser) -> Iterator[Modules]:
    loader = serving_runner(EchoRunner())
    with serving_in_thread(tiny_settings(), loader) as url, visit(browser, url) as seen:
        yield Modules(seen.page)


def test_numbers_have_three_digits_and_a_prefix(modules: Modules) -> None:
    values = {0: "0 B", 1.5: "1.50 B", 999: "999 B", 999.6: "1.00 kB", 12345: "12.3 kB", 2.5e12: "2.50 TB"}
    assert {value: modules.call("units", "scaled", value, "B") for value in values} == values
    times = {3.21e-5: "32.1 µs", 0.0009996: "1.00 ms", 0.0123: "12.3 ms", 1.25: "1.25 s"}
    assert {value: modules.call("units", "seconds", value) for value in times} == times


def test_quantiles_are_linear_within_their_bucket(modules: Modules) -> None:
    values = np.random.default_rng(0).lognormal(-6, 1.5, 5000)
    counts = np.bincount(np.searchsorted(SECONDS, values), minlength=len(SECONDS) + 1)
    bounds = [0.0, *SECONDS]
    for part in (0.01, 0.5, 0.9, 0.99):
        found = modules.call("units", "quantile", part, list(SECONDS), counts.tolist())
        place = int(np.searchsorted(counts.cumsum(), part * len(values)))
        within = (part * len(values) - counts[:place].sum()) / counts[place]
        assert found == pytest.approx(bounds[place] + within * (bounds[place + 1] - bounds[place]))
        assert bounds[place] <= np.quantile(values, part) <= bounds[place + 1]


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "FP16"])
def test_tokens_are_normal_and_rounded_to_nearest(modules: Modules, datatype: str) -> None:
    code = """async ([count, seed, datatype]) => {
        const { normals, encoded } = await import("/page/tokens.js");
        const values = normals(count, seed);
        return [Array.from(values), Array.from(encoded(values, datatype))];
    }"""
    values, encoded = modules._page.evaluate(code, [4096, 7, datatype])
    exact = torch.tensor(values, dtype=torch.float32)
    dtype = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}[datatype]
    found = torch.tensor(encoded, dtype=torch.uint8).view(dtype)
    least = 2.0**-14 if datatype == "FP16" else 0  # smaller ones become 0
    expected = torch.where(exact.abs() < least, 0, exact).to(dtype)
    assert torch.equal(found, expected)
    assert abs(exact.mean()) < 0.1
    assert abs(exact.std() - 1) < 0.1


def test_random_routing_is_valid(modules: Modules) -> None:
    routing = modules.call("tokens", "randomRouting", 50, 8, 16, 3)
    ids, weights = np.array(routing["topk_ids"]), np.array(routing["topk_weights"])
    assert ids.shape == weights.shape == (50, 8)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert (ids.min(), ids.max()) == (0, 15)
    np.testing.assert_allclose(weights.sum(axis=1), 1)


HISTORY = """async ([steps, numLanes]) => {
    const { History, total } = await import("/page/history.js");
    const history = new History(numLanes);
    const sums = steps[0].map(() => 0);
    steps.forEach((ended, second) => {
        const models = Object.fromEntries(ended.map((seconds, model) => {
            sums[model] += seconds;
            const steps = { tokens: 0, steps: second, seconds: sums[model], flops: 0, bytes: 0 };
            const requests = { success: 0, failure: 0, by_seconds: [0], refused: {} };
            return [model, { steps, requests, queue: { tokens: 0, requests: 0 } }];
        }));
        const experts = { model: "0", tokens: [0] };
        history.add({ time: second, models, ranks: [], not_served: {}, experts });
    });
    return history.points.map((point) => total([point], "").busySeconds);
}"""


@pytest.mark.parametrize(
    ("num_lanes", "steps", "expected"),
    [
        (1, [[0], [0.5], [0.25]], [0.5, 0.25]),
        (1, [[0], [0], [0], [2.5], [0.5]], [0.5, 1, 1, 0.5]),  # seconds of the step that ended in each second
        (1, [[0, 0], [0, 0.25], [0.75, 0.75]], [0.75, 1]),
        (1, [[0], [1.5], [1.25]], [1, 1]),  # begun before the page looked
        (2, [[0, 0], [0, 0.25], [0.75, 0.75]], [0.25, 1.5]),
    ],
)
def test_a_second_has_no_more_time_in_steps_than_it_lasts(
    modules: Modules, num_lanes: int, steps: list[list[float]], expected: list[float]
) -> None:
    assert modules._page.evaluate(HISTORY, [steps, num_lanes]) == pytest.approx(expected)


CARDS = """async (counts) => {
    const { Cards } = await import("/page/cards.js");
    const place = document.createElement("div");
    document.body.append(place);
    const zeros = Object.fromEntries(["tokens", "steps", "stepSeconds", "busySeconds", "flops", "bytes",
        "requests", "queueTokens", "queueRequests"].map((name) => [name, 0]));
    const points = counts.map((count, time) =>
        ({ time, seconds: 1, models: { m: { ...zeros, refused: {}, bySeconds: [0, count] } } }));
    new Cards(place).show({ points, now: points, span: 60 }, "", [0.1]);
    const canvas = place.querySelectorAll("canvas")[2];
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let coloured = 0;
    for (let at = 0; at < data.length; at += 4) {
        const pixel = data.slice(at, at + 3);
        if (data[at + 3] && Math.max(...pixel) - Math.min(...pixel) > 60) coloured += 1;
    }
    place.remove();
    return coloured;
}"""


@pytest.mark.parametrize(
    ("counts", "is_drawn"),
    [([0, 0, 0], False), ([0, 3, 0], True), ([3], True), ([0, 3, 3, 0], True)],
    ids=str,
)
def test_a_latency_between_seconds_without_requests_is_drawn(
    modules: Modules, counts: list[int], is_drawn: bool
) -> None:
    assert (modules._page.evaluate(CARDS, counts) > 0) == is_drawn


def test_the_axes_of_the_routing_are_named(modules: Modules) -> None:
    code = """async () => {
        const { drawRouting } = await import("/page/routing.js");
        const place = document.createElement("div");
        drawRouting(place, { topk_ids: [[0], [2]], topk_weights: [[1], [1]] }, 3);
        return [...place.querySelectorAll("text")].map((text) => text.textContent);
    }"""
    assert modules._page.evaluate(code) == ["0", "1", "0", "1", "2", "token", "expert"]


def test_a_gpu_is_described(modules: Modules) -> None:
    gpu = {"power_watts": 412.3, "power_limit_watts": 700, "sm_clock_hertz": 1.98e9, "busy_ratio": 0.875}
    text = "412 of 700 W, 1.98 GHz, 61 °C, busy 87.5 %, held down by power_cap"
    more = {"temperature_celsius": 61, "throttled": ["power_cap"]}
    assert modules.call("gpus", "gpuText", {**gpu, **more}) == text
    assert modules.call("gpus", "gpuText", None) == ""
