"""Settings of ranks, nodes, placements and lanes: mistakes, and what follows from right ones."""

from pathlib import Path

import pytest
import yaml

from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.loader import Flag, load_settings
from expertd.service.settings.model import Settings
from tests.service.apps import tiny_settings
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
        ("ranks: 5", r"ranks: expected at most the number of experts of model m \(4\), got 5"),
        ("backend: reference\ndevices: [0, 1]", r"devices: expected backend hopper, got 'reference'"),
        ("devices: 1", r"devices: expected two GPUs or more, got 1"),
        (
            "devices: 0-1\nlimits: {max_batch_tokens: 524287}",
            r"limits\.max_batch_tokens: expected at most 524286 on 2 GPUs with the top_k of model m \(2\), "
            r"got 524287",
        ),
        ("nnodes: 2", r"rendezvous: expected HOST:PORT with nnodes 2, got none"),
        ("nnodes: 2\nnode_rank: 2\nrendezvous: a:1", r"node_rank: expected less than nnodes \(2\), got 2"),
        ("rendezvous: a:1", r"bad\.yaml:2: nnodes: expected 2 or more with rendezvous a:1, got 1"),
        ("node_rank: 1", r"bad\.yaml:2: node_rank: expected less than nnodes \(1\), got 1"),
        ("rendezvous: a..b:1", r"rendezvous: expected a name or address, got 'a\.\.b'"),
        (
            "nnodes: 3\nranks: 2\nrendezvous: a:1",
            r"ranks: expected at most the number of experts of model m \(4\), got 6",
        ),
        ("devices: [1, 1]", r"devices: expected each number once, got 1,1"),
        ("devices: 0-1\nranks: 3", r"ranks: expected the number of devices \(2\), got 3"),
        ("placement: {policy: static}", r"placement\.policy: expected null with one rank, got 'static'"),
        (
            "ranks: 2\nplacement: {replicas: 1}",
            r"placement\.replicas: expected 0 without placement\.policy, got 1",
        ),
        (
            "ranks: 3\nplacement: {policy: balanced, replicas: 9}",
            r"placement\.replicas: expected at most 8, with which every rank has all experts.*, got 9",
        ),
        (
            "devices: 0\nnnodes: 2\nrendezvous: a:1\nplacement: {policy: static}",
            r"placement\.policy: expected null with GPUs of several nodes, got 'static'",
        ),
        (
            "ranks: 2\nplacement: {policy: best}",
            r"placement\.policy: expected 'static' or 'balanced', got 'best'",
        ),
        (
            "ranks: 2\nplacement: {policy: balanced, interval_seconds: 0}",
            r"placement\.interval_seconds: expected a number greater than 0, got 0",
        ),
        ("ranks: 2\non_rank_loss: shrink", r"on_rank_loss: "),
        (
            "devices: 0-1\nbackend: hopper\nweights_budget: 1GiB\noverlap: {mode: always}",
            r"overlap\.mode: expected auto or never with weights_budget, got 'always'",
        ),
        (
            "lanes: {decode_max_tokens: 8}\nweights_budget: 1GiB",
            r"weights_budget: expected null with lanes, got 1073741824",
        ),
    ],
)
def test_ranks_that_are_impossible_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    check_refused(tmp_path, f"models: [{MODEL}]\n{text}", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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
        (f"models: [{MANY}]\ndevices: 0-8", r"devices: expected at most 8 GPUs of a host, got 9"),
        *(
            (
                f"models: [{MODEL}]\nrendezvous: '{text}'",
                rf"rendezvous: expected HOST:PORT, with a port of 1 to 65535, got '{text}'",
            )
            for text in ("a", "a:0", "a:65536", ":1", "a:b:1", "a b:1")
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
        (
            f"models: [{MANY}]\ndevices: 0-1\nplacement: {{policy: static, replicas: 25}}",
            r"placement\.replicas: expected at most 24 on GPUs with model m, got 25",
        ),
    ],
)
def test_layers_that_ranks_cannot_share_are_refused(tmp_path: Path, text: str, expected: str) -> None:
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


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            "lanes: {decode_max_tokens: 300}",
            r"lanes\.decode_max_tokens: expected at most decode_batch_tokens and limits\.max_batch_tokens "
            r"\(256\), got 300",
        ),
        (
            "lanes: {decode_max_tokens: 65}\nlimits: {max_batch_tokens: 64, max_request_tokens: 64}",
            r"limits\.max_batch_tokens \(64\), got 65",
        ),
        (
            "lanes: {decode_max_tokens: 8, decode_partition: a}",
            r"lanes\.decode_partition: expected one of partitions \(none\), got 'a'",
        ),
        (
            "partitions: {a: 64}\nlanes: {decode_max_tokens: 8, decode_partition: a, prefill_partition: a}",
            r"lanes\.prefill_partition: expected another one than decode_partition, got 'a'",
        ),
        (
            "partitions: {a: 64}\nlanes: {prefill_partition: a}",
            r"lanes\.prefill_partition: expected null with lanes\.decode_max_tokens 0, got 'a'",
        ),
        (
            "lanes: {decode_max_tokens: 8, decode_p99_ms: 1}",
            r"lanes\.decode_p99_ms: expected one of decode_max_tokens, .*, got an unknown setting",
        ),
        (
            "lanes: {decode_max_tokens: 8}\nranks: 2\nbackend: reference",
            r"lanes\.decode_max_tokens: expected 0 with several ranks, got 8",
        ),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, more: str, expected: str) -> None:
    check_refused(tmp_path, f"models: [{MODEL}]\n{more}", expected)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (f"models: [{MODEL[:-1]}, load: false}}]", r"models\.0\.load: expected true with lanes, got false"),
        (
            f"models: [{MODEL[:-1]}, partition: a}}]",
            r"models\.0\.partition: expected null with lanes, got 'a'",
        ),
        (
            "checkpoints: [{path: /nowhere, layers: all, partition: a}]",
            r"checkpoints\.0\.partition: expected null with lanes, got 'a'",
        ),
    ],
)
def test_layers_that_lanes_cannot_serve_are_refused(tmp_path: Path, served: str, expected: str) -> None:
    check_refused(tmp_path, f"{served}\npartitions: {{a: 8}}\nlanes: {{decode_max_tokens: 8}}", expected)


def test_without_lanes_there_is_one_with_the_limits_of_the_server() -> None:
    settings = tiny_settings()
    assert [(lane.name, lane.limits, lane.partition) for lane in lanes_of(settings)] == [
        ("", settings.limits, None)
    ]


def test_what_each_lane_gets() -> None:
    lanes = {"decode_max_tokens": 8, "decode_batch_tokens": 32, "prefill_partition": "rest"}
    settings = tiny_settings(lanes=lanes, partitions={"rest": 100})
    decode, prefill = lanes_of(settings)
    assert (decode.name, decode.partition, decode.is_prefill) == ("decode", None, False)
    assert (decode.limits.max_batch_tokens, decode.limits.prefill_chunk_tokens) == (32, 0)
    assert decode.limits.max_queue_tokens == settings.limits.max_queue_tokens
    assert (prefill.name, prefill.partition, prefill.is_prefill) == ("prefill", "rest", True)
    assert prefill.limits == settings.limits
