"""The GPUs of servers under test."""

import torch


def devices_of_servers() -> list[str | None]:
    """The setting `devices` of each server: one GPU, and all there are."""
    count = min(8, torch.cuda.device_count())
    return [None, f"0-{count - 1}"] if count > 1 else [None]
