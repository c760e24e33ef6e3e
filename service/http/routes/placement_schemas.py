"""The bodies of /v1/placement."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from expertd.limits import MAX_EXPERTS


class PlacementRequest(BaseModel):
    """rebalance: plan from the present loads, and carry out what gains 5% or more. pin: give each rank of a
    model these experts, until `rebalance` releases them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["rebalance", "pin"]
    model: str | None = Field(default=None, description="null: all, with rebalance")
    ranks: (
        Annotated[list[Annotated[list[int], Field(max_length=MAX_EXPERTS)]], Field(max_length=64)] | None
    ) = Field(
        default=None,
        description="with pin: the experts of each rank, as many as it holds; an expert may be there "
        "several times, and each time gets an equal share of its tokens",
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for name, value in (("model", self.model), ("ranks", self.ranks)):
            if self.action == "pin" and value is None:
                raise ValueError(f"expected {name} with pin, got none")
        if self.action == "rebalance" and self.ranks is not None:
            raise ValueError("expected no ranks with rebalance, got some")
        return self


class RankPlacement(BaseModel):
    experts: list[int] = Field(
        description="those that it holds, or will hold once it is up, one for each physical expert"
    )
    load: float = Field(description="recent, if replicas share their expert's load equally")
    up: bool = Field(description="whether it runs steps")


class PlanResponse(BaseModel):
    before: float = Field(description="max/mean of the ranks' loads")
    after: float = Field(description="the same, as planned")
    moves: int = Field(description="experts that were to move; 0: the gain was below 5 %")


class LayerPlacement(BaseModel):
    ranks: list[RankPlacement]
    loads: list[float] = Field(description="of each expert, recently: tokens, or steps that activated it")
    max_over_mean: float = Field(description="of the loads of the ranks")
    pinned: bool
    last_plan: PlanResponse | None
    moves: int = Field(description="experts that moved so far")
    move_seconds: float


class PlacementResponse(BaseModel):
    policy: Literal["static", "balanced"]
    objective: Literal["tokens", "activated"]
    moving: bool
    models: dict[str, LayerPlacement]
