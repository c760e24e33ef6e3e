"""The page in a real browser: it shows what the server does, and its controls work."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.service.apps import MODEL, serving_runner, tiny_settings
from tests.service.http.page.browser import needs_chromium, visit
from tests.service.http.page.threads import serving_in_thread
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tiny_settings(models=TWO), tmp_path_factory.mktemp("page")) as process:
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
