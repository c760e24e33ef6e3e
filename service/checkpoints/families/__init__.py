"""The table of model families: a row for each model_type of config.json, in sigmoid.py and softmax.py.

The loader, the tests and docs/checkpoints.md all read it.
"""

from expertd.service.checkpoints.families.describe import describe
from expertd.service.checkpoints.families.family import Family
from expertd.service.checkpoints.families.sigmoid import SIGMOID
from expertd.service.checkpoints.families.softmax import SOFTMAX

FAMILIES: dict[str, Family] = dict(sorted((SIGMOID | SOFTMAX).items()))
"""Rows by model_type."""

__all__ = ["FAMILIES", "Family", "describe"]
