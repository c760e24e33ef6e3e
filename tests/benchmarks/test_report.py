"""The documents match the results, and a changed result is noticed."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, report
from benchmarks.layer.moe_layer import STAGES
from benchmarks.layer.report import over_floor
from benchmarks.report import SECTIONS
from tests.paths import ROOT

RESULTS = sorted(path.name for path in (ROOT / "benchmarks" / "results").iterdir())


def halved(value: Any) -> Any:
    """A JSON value with every float halved, except settings of the run."""
    if isinstance(value, dict):
        return {key: halved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [halved(item) for item in value]
    return value / 2 if isinstance(value, float) else value


def write(directory: Path, name: str, content: object) -> Path:
    (directory / name).write_text(json.dumps(content))
    return directory


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the documents and results, for tests to change."""
    for name in (*report.DOCUMENTS, *pictures.measured(ROOT / "benchmarks" / "results")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def test_documents_match_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.report", "--check"])
    report.main()


def test_a_copy_matches_too(copy: Path) -> None:
    assert report.stale(copy) == []


@pytest.mark.parametrize("name", RESULTS)
def test_a_changed_result_is_noticed(name: str, copy: Path) -> None:
    path = copy / "benchmarks" / "results" / name
    if path.suffix == ".json":
        path.write_text(json.dumps(halved(json.loads(path.read_text()))))
    else:
        path.write_text(re.sub(r"[\d.]+$", "9.99", path.read_text(), flags=re.M))
    assert report.stale(copy)


@pytest.mark.parametrize("document", report.DOCUMENTS)
def test_a_changed_figure_is_noticed(document: str, copy: Path) -> None:
    path = copy / document
    text = path.read_text()
    sections = re.finditer(r"<!-- report:.*?<!-- /report -->", text, re.S)
    changed = (section for section in sections if re.search(r"\d\.\d\d", section[0]))
    first = next(changed)  # one before it may say that nothing has been measured
    new = re.sub(r"\d\.\d\d", "7.77", first[0], count=1)
    path.write_text(text[: first.start()] + new + text[first.end() :])
    assert report.stale(copy) == [document]


def test_every_section_is_in_a_document() -> None:
    texts = "".join((ROOT / name).read_text() for name in report.DOCUMENTS)
    assert set(re.findall(r"<!-- report:([\w-]+) -->", texts)) == set(SECTIONS)


def test_the_readme_has_no_other_figures() -> None:
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"<!-- (report|first-run).*?<!-- /\1 -->|^```.*?^```$", "", text, flags=re.M | re.S)
    assert re.findall(r"\d[\d.]*\s*(?:%|µs|ms|TFLOPS|TB/s|times\b)", text) == []


def layer_result(tmp_path: Path, name: str = "moe_layer-h200.json", **more: object) -> Path:
    """Two rows of a layer, with round figures."""
    about = {"gpu": "GPU, 1.2, x", "nvrtc": "13.0", "torch": "2", "copy_tbps": 4.0, "deep_gemm": "0.1"} | more
    stages = dict.fromkeys(STAGES, 10.0) | {"quantize": 40.0, "combine": 60.0}
    row = {"layer": "qwen3-30b-a3b", "us": 500.0, "stages_us": stages}
    rows = [
        row | {"tokens": 1, "activated_experts": 8, "two_gemms_us": 1000.0, "over_two_gemms": 0.5,
               "mega_moe_us": 2000.0, "over_mega_moe": 0.25},
        row | {"tokens": 4096, "activated_experts": 128, "two_gemms_us": 250.0, "over_two_gemms": 2.0,
               "mega_moe_us": 500.0, "over_mega_moe": 1.0},
    ]  # fmt: skip
    router = [{"tokens": 1, "router_us": 7.25}, {"tokens": 16, "router_us": 8.0}]
    return write(tmp_path, name, {"about": about, "rows": rows, "router": router})


def test_the_headline_names_versions_sizes_and_what_is_slower(tmp_path: Path) -> None:
    results = layer_result(tmp_path, "moe_layer_newest-h200.json", commit="abc")
    text = SECTIONS["headline"](results).replace("\n", " ")
    assert "On one GPU, a whole MoE layer runs **2.00 times as fast as SM90 Mega MoE of [DeepGEMM](" in text
    assert ") 0.1**, and 1.00 times as fast as its two grouped GEMMs alone." in text
    assert "2 cases: qwen3-30b-a3b with 128 experts of 2048 x 768; 1 to 4096 tokens." in text
    assert text.endswith("1.00 to 4.00 times; slower: none.")
    content = json.loads((results / "moe_layer_newest-h200.json").read_text())
    for row in content["rows"]:
        row["over_mega_moe"] = 1.25
    text = SECTIONS["headline"](write(tmp_path, "moe_layer_newest-h200.json", content)).replace("\n", " ")
    assert text.endswith("0.80 to 0.80 times; slower: qwen3-30b-a3b at 1 and 4096 tokens.")
    assert SECTIONS["layer-newest"](results).splitlines()[2] == (
        "| qwen3-30b-a3b | 1 | 500.0 | 1000.0 | 0.50 | 2000.0 | 1.25 |"
    )
    assert SECTIONS["layer-newest-machine"](results).endswith("sgl-deep-gemm 0.1; this project at abc.")


def test_the_layers_tables(tmp_path: Path) -> None:
    results = layer_result(tmp_path)
    about = {"copy_tbps": 4.0}
    rows = json.loads((results / "moe_layer-h200.json").read_text())["rows"]
    # An expert has 4.72 MB, 1.18 us; 32768 pairs take 309 GFLOP, 209 us.
    assert [round(over_floor(about, row), 2) for row in rows] == [52.98, 2.39]
    assert SECTIONS["router"](results) == "| tokens | 1 | 16 |\n|---|---|---|\n| µs more | 7.2 | 8.0 |"
    # 4096 tokens, 2048 columns, top 8: 16.8 MB read and 69.2 MB written, then 134.2 MB and 16.8 MB
    around = SECTIONS["layer-around"](results).replace("\n", " ")
    assert "take 20 to 20% of the whole, at 54 to 63% of the copy's bandwidth" in around


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.measured(ROOT / "benchmarks" / "results"))
def test_pictures_show_what_is_in_the_documents(name: str, tmp_path: Path) -> None:
    """They have the names of what they show."""
    result, draw = pictures.PICTURES[name]
    file = ROOT / "benchmarks" / "results" / result
    draw(file, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert pictures.digest(file) in drawn
    shown = [set(re.findall("<!-- (.*) -->", text)) for text in (drawn, (ROOT / name).read_text())]
    assert shown[0] == shown[1]


def test_pictures_are_reproducible(tmp_path: Path) -> None:
    """What the same version of matplotlib draws: `pictures.picture` sees to that for all."""
    result, draw = pictures.PICTURES["docs/serving-h200.svg"]
    for copy in ("first.svg", "second.svg"):
        draw(ROOT / "benchmarks" / "results" / result, tmp_path / copy)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_soaks_of_vllm_say_who_has_which_gpu_and_what_was_not_counted(tmp_path: Path) -> None:
    header = {
        "seconds": 240.0, "cores": 16, "cpu": "CPU", "commit": "abc", "late": 2.0, "gpu": "NVIDIA H200",
        "transport": "device", "vllm_gpu": "0", "server_gpus": ["1", "0"],
    }  # fmt: skip
    times = {when: {"p99_ms": 10.0 + number} for number, when in enumerate(("calm", "kill", "stop"))}
    content = {
        "header": header, "calls": 7, "lost": 0, "wrong": 0, "late": 1, "events": {"kill": 2, "stop": 1},
        "times": times, "waits": ["stop"],
    }  # fmt: skip
    write(tmp_path, "soak-pool-vllm-2xh200.json", content)
    text = SECTIONS["soak-pool-vllm"](tmp_path).replace("\n", " ")
    assert text == (
        "`device`, vLLM on GPU 0, servers on GPUs 1 and 0, each an NVIDIA H200: 240 s on 16 cores of an CPU "
        "at abc: 2 kills, 1 stop. Of 7 calls, 0 were lost, 0 wrong, and 1 took longer than 2 s. "
        "Their p99 in ms was 10.00 in between, 11.00 during kills, 12.00 during stops. The limit of "
        "2 s does not apply during stops."
    )
    http = content | {"header": header | {"transport": "http"}, "waits": []}
    write(tmp_path, "soak-pool-vllm-http-2xh200.json", http)
    assert "\n\n`http`, vLLM on GPU 0" in SECTIONS["soak-pool-vllm"](tmp_path)
