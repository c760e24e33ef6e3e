"""The settings of a server. `expertd.service.settings.loader` loads them."""

from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from expertd.service.settings.checks import disagreements
from expertd.service.settings.fields import Fields
from expertd.service.settings.served import ModelSettings
from expertd.service.settings.values import check_agreement
from expertd.weight_format import WeightFormat


class Settings(Fields):
    """All settings of a server. Built directly, it reads neither files nor the environment."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        check_agreement(disagreements(self))
        return self

    @property
    def weight_formats(self) -> frozenset[WeightFormat]:
        """Of experts in memory; layers of `checkpoints` count once they are models."""
        layouts = [(model.shape.weight_layout, model.shape.shared_layout) for model in self.models]
        return frozenset(layout.format for of_model in layouts for layout in of_model)

    def with_models(self, models: Sequence[ModelSettings]) -> Self:
        """These settings with `checkpoints` replaced by their layers in `models`, validated again."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return self.model_validate(values | {"models": (*self.models, *models), "checkpoints": ()})
