"""The page in a real browser: it shows what the server does, its controls work, its arithmetic is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from expertd.service.engine.metrics.family import SECONDS
from tests.service.apps import MODEL, serving_runner, tiny_settings
from tests.service.http.page.browser import chromium, needs_chromium, serving_in_thread, visit
from tests.service.http.routes.test_partitions import Device
from tests.service.keys import key_of, write_keys
from tests.service.load import Load
from tests.service.processes import ServerProcess, server_process
from tests.service.runners import EchoRunner

pytestmark = [pytest.mark.slow, pytest.mark.thorough, needs_chromium]

TWO = [MODEL, {**MODEL, "name": "other", "datatype": "BF16", "num_experts": 8}]
DRAWN = """canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
    .data.some(Boolean)"""
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = tiny_settings(models=TWO, page={"peers": [f"http://experts-{n}:8000" for n in range(8)]})
    with server_process(settings, tmp_path_factory.mktemp("page")) as process:
        yield process


def test_figures_move_under_traffic(browser: Browser, server: ServerProcess) -> None:
    with visit(browser, f"http://{server.url}/") as seen:
        seen.wait_text("#state", "^ready$")
        assert "reference" in seen.text("#about")
        seen.wait_text("#cards", r"Tokens per second\s*0\s")
        with Load([server]):
            seen.wait_text("#cards", r"Tokens per second\s*[1-9][\d.]*( k)?\s")
            seen.wait_text("#cards", r"Latency, log scale[\sp\d]*?\n[\d.]+ [µm]s, [\d.]+ [µm]s")
            seen.wait_text("#heat-scope", r"tiny: busiest expert \d at [\d.]+ . mean, \d of 4 used")
            seen.wait_text("#refusals", r"invalid_request\s+tiny: a tensor or parameter is wrong\s+\d+")
            seen.wait_text("#refusals-total", r"invalid_request \d+\.$")
            row = seen.wait_text("#layers tbody tr:nth-child(2)", r"2 of 4\s+[1-9]").split("\t")
        assert row[:2] == ["tiny", "ready"]
        first = seen.page.locator("#cards canvas").first
        label = first.get_attribute("aria-label") or ""
        assert label.startswith("Tokens per second: now ")
        for canvas in (first, seen.page.locator("#heat")):
            assert canvas.evaluate(DRAWN)
        assert seen.errors == []
        assert seen.hosts == {server.url}


def test_an_unloaded_layer_is_shown_as_that(browser: Browser, tmp_path: Path) -> None:
    settings = tiny_settings(models=[MODEL, {**TWO[1], "load": False}])
    with server_process(settings, tmp_path) as process, visit(browser, f"http://{process.url}/") as seen:
        row = seen.wait_text("#layers tbody tr:nth-child(3)", "loaded|ready").split("\t")
        assert row[:2] == ["other", "unloaded"]
        assert seen.text("#layers tbody tr:nth-child(2)").split("\t")[:2] == ["tiny", "ready"]


def test_the_page_links_to_its_peers(browser: Browser) -> None:
    """As they are written, and fetches nothing from them before somebody follows a link."""
    loader = serving_runner(EchoRunner())
    with serving_in_thread(tiny_settings(), loader) as other:
        peers = [other, "https://proxy/experts-1/<b>x</b>?a=\"'&b"]
        with (
            serving_in_thread(tiny_settings(page={"peers": peers}), loader) as url,
            visit(browser, url) as seen,
        ):
            host = other.removeprefix("http://").removesuffix("/")
            seen.wait_text("#peers", f"^pool:\\s*{host}\\s*proxy/experts-1/%3Cb%3Ex%3C/b%3E$")
            links = seen.page.locator("#peers a")
            assert links.nth(1).get_attribute("href") == peers[1]
            assert [links.nth(place).get_attribute("aria-current") for place in range(2)] == [None, None]
            assert seen.hosts == {url.removeprefix("http://").removesuffix("/")}
            assert seen.errors == []
            links.first.click()
            seen.page.wait_for_url(other)
            seen.wait_text("#state", "^ready$")
            assert not seen.page.locator("#peers").is_visible()


def test_the_page_marks_itself_among_its_peers(browser: Browser) -> None:
    with serving_in_thread(tiny_settings(), serving_runner(EchoRunner())) as url:
        events = httpx.get(f"{url}v1/live?events=1", timeout=60, verify=False).text
        assert '"peers":[]' in events
        events = events.replace('"peers":[]', f'"peers":["http://a:8000","{url}"]')
        with visit(browser, url) as seen:
            seen.page.route("**/v1/live*", lambda route: route.fulfill(body=events))
            seen.page.reload()
            seen.wait_text("#peers", "a:8000")
            links = seen.page.locator("#peers a")
            assert [links.nth(place).get_attribute("aria-current") for place in range(2)] == [None, "page"]


def test_a_request_is_sent_and_its_routing_drawn(browser: Browser, server: ServerProcess) -> None:
    def tokens(model: str) -> int:
        (entry,) = server.get(f"/v2/models/{model}/stats").json()["model_stats"]
        return int(entry["inference_count"])

    with visit(browser, f"http://{server.url}/") as seen:
        seen.wait_text("#state", "^ready$")
        for model, routed_by, count in (("tiny", "layer", 5), ("other", "layer", 3), ("other", "random", 7)):
            before = tokens(model)
            seen.page.locator("#try-model").select_option(model)
            seen.page.locator("#try-routing").select_option(routed_by)
            seen.page.locator("#try-tokens").fill(str(count))
            seen.page.get_by_role("button", name="Send").click()
            seen.wait_text("#try-answer", rf"Answered in .*of {count} tokens\.$")
            assert tokens(model) == before + count
            assert seen.page.locator("#routing path").count() == 2 * count
            assert seen.page.locator("#routing circle").count() == count
            assert seen.page.locator("#routing-table tbody tr").count() == count
        assert seen.errors == []


def test_the_drawn_routing_is_what_was_computed(browser: Browser, server: ServerProcess) -> None:
    def by_expert() -> list[float]:
        lines = server.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith('expertd_expert_tokens_total{expert="')]
        return [float(line.split()[-1]) for line in found if 'model="tiny"' in line]

    with visit(browser, f"http://{server.url}/") as seen:
        seen.wait_text("#state", "^ready$")
        before = by_expert()
        seen.page.locator("#try-seed").fill("7")
        seen.page.get_by_role("button", name="Send").click()
        seen.wait_text("#try-answer", "Answered")
        texts = seen.page.locator("#routing-table td:last-child").all_text_contents()
    drawn = [int(choice.split("(")[0]) for text in texts for choice in text.split(", ")]
    computed = [after - least for after, least in zip(by_expert(), before, strict=True)]
    assert computed == [drawn.count(expert) for expert in range(4)]


def test_the_keyboard_reaches_everything(browser: Browser, server: ServerProcess) -> None:
    with visit(browser, f"http://{server.url}/") as seen, Load([server]):
        seen.wait_text("#heat-scope", "tiny: busiest")
        buttons = seen.page.locator("#layers button")
        assert buttons.all_inner_texts() == ["all layers", "tiny", "other"]
        buttons.nth(2).focus()
        seen.page.keyboard.press("Enter")
        assert buttons.nth(2).get_attribute("aria-pressed") == "true"
        seen.wait_text("#heat-scope", "^other: ")
        assert seen.page.evaluate("document.activeElement.innerText") == "other", "updates keep the focus"
        buttons.nth(1).press("Enter")
        seen.wait_text("#heat-scope", "^tiny: busiest")
        seen.page.locator("#heat").focus()
        for key in ("ArrowLeft", "ArrowDown", "ArrowDown"):
            seen.page.keyboard.press(key)
        seen.wait_text("#heat-cell", r"^expert 2 at \d\d:\d\d:\d\d: \d+ tokens?, [\d.]+ . mean$")
        assert seen.errors == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
def test_axe_finds_nothing_serious_and_nothing_sticks_out(
    browser: Browser, server: ServerProcess, scheme: Literal["light", "dark"], width: int
) -> None:
    with visit(browser, f"http://{server.url}/", width, scheme) as seen, Load([server]):
        seen.wait_text("#refusals", "invalid_request")
        seen.page.get_by_role("button", name="Send").click()
        seen.page.locator("#routing svg").wait_for()
        found = Axe().run(seen.page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS] == []
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width


def test_the_device_is_repartitioned(browser: Browser) -> None:
    device = Device()
    settings = tiny_settings(models=[{**MODEL, "partition": "compute"}], partitions={"compute": 64})
    device.apply({"compute": 64})
    with (
        serving_in_thread(settings, serving_runner(EchoRunner(), device)) as url,
        visit(browser, url) as seen,
    ):
        seen.wait_text("#partition-legend", r"compute 64 SMs: tiny\s+in no partition 68 SMs")
        cells = seen.page.locator("#sms i")
        assert cells.count() == 132
        assert seen.page.locator("#sms i.c0").count() == 64

        seen.page.get_by_label("SMs of the partition").first.fill("100")
        seen.page.get_by_role("button", name="Add").click()
        seen.page.get_by_label("partition's name").last.fill("communication")
        seen.page.get_by_label("SMs of the partition").last.fill("20")
        assert "128 of 132 SMs, in units of 8" in seen.text("#partition-sum")
        seen.page.get_by_role("button", name="Repartition").click()
        seen.wait_text("#partitions-answer", "^Granted: compute 104, communication 24 SMs.$")
        seen.wait_text("#partition-legend", r"compute 104 SMs \(100 requested\): tiny")
        assert [share.num_sms for share in device.partitions] == [104, 24]
        assert seen.page.locator("#sms i.c1").count() == 24
        assert seen.errors == []

        seen.page.get_by_label("partition's name").first.fill("other")
        seen.page.get_by_role("button", name="Repartition").click()
        answer = seen.wait_text("#partitions-answer", "^partitions: expected")
        assert answer.startswith("partitions: expected 'compute', in which model tiny runs, among them, got")
        assert [share.num_sms for share in device.partitions] == [104, 24], "nothing changed"


def test_without_a_gpu_the_reason_is_shown(browser: Browser, server: ServerProcess) -> None:
    with visit(browser, f"http://{server.url}/") as seen:
        assert seen.wait_text("#partitions-note", "partition") == "This device has no SMs to partition."
        assert not seen.page.locator("#partitions").is_visible()
        assert not seen.page.locator("#sms").is_visible()


def test_data_need_a_key_and_controls_their_right(browser: Browser, tmp_path: Path) -> None:
    rights = {"viewer": ["metrics"], "operator": ["metrics", "admin", "infer"]}
    settings = tiny_settings(keys=write_keys(tmp_path / "keys.yaml", **rights))
    device = Device()
    with (
        serving_in_thread(settings, serving_runner(EchoRunner(), device)) as url,
        visit(browser, url) as seen,
    ):

        def use(name: str) -> None:
            seen.page.get_by_label("API key").fill(key_of(name))
            seen.page.get_by_role("button", name="Use").click()

        def repartition() -> None:
            seen.page.get_by_role("button", name="Repartition").click()

        seen.wait_text("#state", "^Authorization: expected Bearer and a key, got none$")
        assert not seen.page.locator("#layers tbody tr").count()
        use("nobody")
        seen.wait_text("#state", "^Authorization: expected a key of this server, got an unknown one$")
        use("viewer")
        seen.wait_text("#state", "^ready$")
        repartition()
        seen.wait_text("#partitions-answer", "^key viewer: expected the right admin, got metrics$")
        seen.page.get_by_role("button", name="Send").click()
        seen.wait_text("#try-answer", "^key viewer: expected the right infer, got metrics$")
        use("operator")
        seen.wait_text("#state", "^ready$")
        repartition()
        seen.wait_text("#partitions-answer", "^Granted: compute 8 SMs.$")
        assert key_of("operator") not in seen.page.content()
        assert key_of("operator") not in seen.page.url


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
