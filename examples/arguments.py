"""Types of the examples' command line arguments."""

import argparse

import torch


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def device(text: str) -> str:
    """A device that this machine has: cpu, cuda or cuda:1."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    known = ["cpu", *(["cuda", *gpus] if gpus else [])]
    if text not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {text}")
    return text
