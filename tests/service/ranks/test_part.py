"""Which steps of a rank's models may run at the same time."""

import pytest

from expertd.service.ranks.worker.worker import share_sms


@pytest.mark.parametrize(
    ("partition", "other", "expected"),
    [
        (None, None, False),  # one stream
        ("a", "a", False),
        ("a", "b", False),  # SMs of their own
        ("a", None, True),
        (None, "a", True),
    ],
)
def test_steps_in_a_partition_and_on_the_whole_device_share_sms(
    partition: str | None, other: str | None, expected: bool
) -> None:
    assert share_sms(partition, other) is expected
