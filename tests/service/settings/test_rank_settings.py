"""Settings of ranks, nodes and placements: mistakes, and what follows from right ones."""

from pathlib import Path

import pytest
import yaml

from expertd.service.settings.loader import Flag, load_settings
from expertd.service.settings.model import Settings
from tests.paths import ROOT
from tests.service.settings.refusals import MODEL, check_refused

MANY = MODEL.replace("num_experts: 4", "num_experts: 1000")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"models: [{MODEL}]\n")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"models: [{MODEL}]\nranks: 5",
            r"ranks: expected at most the number of experts of model m \(4\), got 5",
        ),
        (
            f"models: [{MODEL[:-1]}, local_experts: 1-2}}]\nranks: 3",
            r"ranks: expected at most the number of experts of model m \(2\), got 3",
        ),
        (
            f"models: [{MODEL[:-1]}, local_experts: 0-1}}]\nranks: 2\nplacement: {{policy: static}}",
            r"models\.0\.local_experts: expected null with placement\.policy, got 0-1",
        ),
        (
            f"models: [{MODEL[:-1]}, masked_max_tokens: 8}}]\ndevices: [0, 1]",
            r"models\.0\.masked_max_tokens: expected 0 with several ranks, got 8",
        ),
        (
            "checkpoints: [{path: /none, layers: 3, experts: 0-1}]\nranks: 2\nplacement: {policy: static}",
            r"checkpoints\.0\.experts: expected null with placement\.policy, got 0-1",
        ),
        (
            f"models: [{MODEL}]\nbackend: reference\ndevices: [0, 1]",
            r"devices: expected backend hopper, got 'reference'",
        ),
        (f"models: [{MODEL}]\ndevices: 1", r"devices: expected two GPUs or more, got 1"),
        (f"models: [{MANY}]\ndevices: 0-8", r"devices: expected at most 8 GPUs of a host, got 9"),
        (
            f"models: [{MODEL}]\ndevices: 0-1\nlimits: {{max_batch_tokens: 524287}}",
            r"limits\.max_batch_tokens: expected at most 524286 on 2 GPUs with the top_k of model m \(2\), "
            r"got 524287",
        ),
        (f"models: [{MODEL}]\nnnodes: 2", r"rendezvous: expected HOST:PORT with nnodes 2, got none"),
        (
            f"models: [{MODEL}]\nnnodes: 2\nnode_rank: 2\nrendezvous: a:1",
            r"node_rank: expected less than nnodes \(2\), got 2",
        ),
        (
            f"models: [{MODEL}]\nrendezvous: a:1",
            r"bad\.yaml:2: nnodes: expected 2 or more with rendezvous a:1, got 1",
        ),
        (
            f"models: [{MODEL}]\nnode_rank: 1",
            r"bad\.yaml:2: node_rank: expected less than nnodes \(1\), got 1",
        ),
        *(
            (
                f"models: [{MODEL}]\nrendezvous: '{text}'",
                rf"rendezvous: expected HOST:PORT, with a port of 1 to 65535, got '{text}'",
            )
            for text in ("a", "a:0", "a:65536", ":1", "a:b:1", "a b:1")
        ),
        (f"models: [{MODEL}]\nrendezvous: a..b:1", r"rendezvous: expected a name or address, got 'a\.\.b'"),
        (
            f"models: [{MODEL}]\nnnodes: 3\nranks: 2\nrendezvous: a:1",
            r"ranks: expected at most the number of experts of model m \(4\), got 6",
        ),
        *(
            (
                f"host: ::1\nmodels: [{MODEL}]\noverlap: {{mode: always}}{more}",
                rf"bad\.yaml:3{lines}: overlap\.mode: expected auto or never without GPUs of one machine "
                r"\(devices\), got 'always'",
            )
            for more, lines in (
                ("", ""),
                ("\nranks: 2", ""),
                ("\ndevices: 0-1\nnnodes: 2\nrendezvous: a:1", r", .*bad\.yaml:4"),
            )
        ),
        (f"models: [{MODEL}]\ndevices: [1, 1]", r"devices: expected each number once, got 1,1"),
        (
            f"models: [{MODEL}]\ndevices: 0-1\nranks: 3",
            r"ranks: expected the number of devices \(2\), got 3",
        ),
        (
            f"models: [{MODEL}]\nplacement: {{policy: static}}",
            r"placement\.policy: expected null with one rank, got 'static'",
        ),
        (
            f"models: [{MODEL}]\nranks: 2\nplacement: {{replicas: 1}}",
            r"placement\.replicas: expected 0 without placement\.policy, got 1",
        ),
        (
            f"models: [{MODEL}]\nranks: 3\nplacement: {{policy: balanced, replicas: 9}}",
            r"placement\.replicas: expected at most 8, with which every rank has all experts.*, got 9",
        ),
        (
            f"models: [{MANY}]\ndevices: 0-1\nplacement: {{policy: static, replicas: 25}}",
            r"placement\.replicas: expected at most 24 on GPUs with model m, got 25",
        ),
        (
            f"models: [{MODEL}]\ndevices: 0\nnnodes: 2\nrendezvous: a:1\nplacement: {{policy: static}}",
            r"placement\.policy: expected null with GPUs of several nodes, got 'static'",
        ),
        (
            f"models: [{MODEL}]\nranks: 2\nplacement: {{policy: best}}",
            r"placement\.policy: expected 'static' or 'balanced', got 'best'",
        ),
        (
            f"models: [{MODEL}]\nranks: 2\nplacement: {{policy: balanced, interval_seconds: 0}}",
            r"placement\.interval_seconds: expected a number greater than 0, got 0",
        ),
        (f"models: [{MODEL}]\nranks: 2\non_rank_loss: shrink", r"on_rank_loss: "),
    ],
)
def test_ranks_that_are_impossible_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    check_refused(tmp_path, text, expected)


def test_ranks_of_several_nodes() -> None:
    given = {"models": [yaml.safe_load(MODEL)], "rendezvous": "node-0:29500", "nnodes": 2}
    for more in ({"ranks": 2}, {"devices": "0-1"}):
        settings = Settings.model_validate({**given, **more})
        assert (settings.num_ranks, settings.ranks_per_node) == (4, 2)
    assert Settings.model_validate({**given, "devices": "0"}).num_ranks == 2, "one GPU of each node"


def test_ranks_combine_exactly_where_placements_change(config: Path) -> None:
    ranks, policy = Flag("--ranks", "ranks", "2"), Flag("--set", "placement.policy", "static")
    given = Flag("--set", "exact_combine", "false")
    assert not load_settings(config, [ranks]).combines_exactly
    assert load_settings(config, [ranks, policy]).combines_exactly
    assert not load_settings(config, [ranks, policy, given]).combines_exactly
    assert load_settings(config, [ranks, Flag("--set", "exact_combine", "true")]).combines_exactly


def test_the_demo_with_ranks_is_the_same_layer() -> None:
    demo, shared = (load_settings(ROOT / "configs" / f"{name}.yaml") for name in ("demo", "demo-2ranks"))
    assert shared.models == demo.models
    assert (demo.num_ranks, shared.num_ranks) == (1, 2)


def test_ranks_are_counted_by_devices_or_alone(config: Path) -> None:
    assert load_settings(config).num_ranks == 1
    assert load_settings(config, [Flag("--ranks", "ranks", "4")]).num_ranks == 4
    assert load_settings(config, [Flag("--devices", "devices", "0-2")]).num_ranks == 3
    config.write_text(config.read_text() + "devices: [1, 0]\n")
    assert load_settings(config).devices == "1,0"
