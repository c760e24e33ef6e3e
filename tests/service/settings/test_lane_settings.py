"""The settings of lanes: mistakes are refused, and what each lane gets."""

from pathlib import Path

import pytest

from expertd.service.settings.lanes import lanes_of
from tests.service.apps import tiny_settings
from tests.service.settings.refusals import MODEL, check_refused


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


def test_a_model_that_is_to_be_loaded_later_is_refused(tmp_path: Path) -> None:
    model = f"{MODEL[:-1]}, load: false}}"
    expected = r"models\.0\.load: expected true with lanes, got false"
    check_refused(tmp_path, f"models: [{model}]\nlanes: {{decode_max_tokens: 8}}", expected)


def test_a_model_in_a_partition_of_its_own_is_refused(tmp_path: Path) -> None:
    model = f"{MODEL[:-1]}, partition: a}}"
    expected = r"models\.0\.partition: expected null with lanes, got 'a'"
    check_refused(
        tmp_path, f"models: [{model}]\npartitions: {{a: 8}}\nlanes: {{decode_max_tokens: 8}}", expected
    )
    checkpoint = "checkpoints: [{path: /nowhere, layers: all, partition: a}]"
    expected = r"checkpoints\.0\.partition: expected null with lanes, got 'a'"
    check_refused(tmp_path, f"{checkpoint}\npartitions: {{a: 8}}\nlanes: {{decode_max_tokens: 8}}", expected)


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
