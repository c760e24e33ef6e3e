"""The settings of what is served: models, and checkpoints whose layers become models."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertd.limits import MAX_EXPERTS, SCALE_BLOCK
from expertd.routing import Routing
from expertd.service.moe.shape import LayerShape
from expertd.service.settings.parts import Frozen
from expertd.service.settings.spans import Layers, Range, numbers
from expertd.service.settings.values import NumBytes, matching


class WeightsSettings(Frozen):
    """The source of a layer's weights: a random seed or a safetensors file."""

    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        description="seed of reproducible random weights; 0 if `weights` is omitted",
    )
    path: Path | None = Field(
        default=None, description="safetensors file in the format of docs/checkpoints.md"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.seed is None) == (self.path is None):
            got = "neither" if self.seed is None else "both"
            raise ValueError(f"expected exactly one of seed and path, got {got}")
        return self


class RoutingSettings(Frozen):
    """The router's scoring function and its selection of experts; see `Routing`."""

    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = Field(
        default="softmax",
        description="scoring of router logits: softmax over all experts, sigmoid of each, the square root of "
        "the softplus of each, or for each choice the softmax over those close to the largest that is left",
    )
    renormalize: bool = Field(
        default=True, description="whether a token's routing weights are divided by their sum"
    )
    routed_scaling_factor: float = Field(
        default=1.0, gt=0, le=1e6, description="factor on the routing weights, after renormalization"
    )
    num_expert_groups: int = Field(
        default=1, ge=1, description="number of equal groups the experts are divided into"
    )
    topk_group: int = Field(
        default=1, ge=1, description="number of best groups a token's experts are chosen from"
    )
    group_score: Literal["best_two", "best"] = Field(
        default="best_two",
        description="score of a group: the sum of its two best experts' scores, or the best one",
    )
    bias_on: Literal["choice", "logits"] = Field(
        default="choice",
        description="what a router's bias is added to: the scores that choose experts, or the logits",
    )

    @property
    def rule(self) -> Routing:
        """The rule for the kernels. Raises ValueError for an impossible one."""
        return Routing(**self.model_dump())

    @model_validator(mode="after")
    def _rule_is_possible(self) -> Self:
        assert self.rule
        return self


_Name = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, '.', '_' or '-', beginning with a letter or digit"
    ),
]
_Datatype = Literal["BF16", "FP16", "FP32"]


class ModelSettings(Frozen):
    """One MoE layer served under a name."""

    name: _Name = Field(description="name of the layer in requests")
    hidden_size: int = Field(
        ge=SCALE_BLOCK, multiple_of=SCALE_BLOCK, description="elements of a token's hidden state"
    )
    intermediate_size: int = Field(
        ge=SCALE_BLOCK,
        multiple_of=SCALE_BLOCK,
        description="elements of an expert's activation between up and down projection",
    )
    num_experts: int = Field(ge=1, le=MAX_EXPERTS, description="number of routed experts")
    top_k: int = Field(ge=1, description="number of routed experts per token")
    num_shared_experts: int = Field(
        default=0,
        ge=0,
        description="number of shared experts, each of `intermediate_size`; every token uses all of them",
    )
    shared_experts: bool = Field(
        default=True,
        description="whether answers have the shared experts' part; false: their weights are not read, and "
        "callers compute them",
    )
    local_experts: Range | None = Field(
        default=None, description="routed experts held here, e.g. `0-63`; null: all"
    )
    routing: RoutingSettings = Field(default=RoutingSettings(), description="routing rule")
    weights: WeightsSettings = Field(default=WeightsSettings(seed=0), description="source of the weights")
    datatype: _Datatype = Field(
        default="BF16",
        description="datatype in the metadata, and of requests without a JSON header",
    )
    masked_max_tokens: int = Field(
        default=0,
        ge=0,
        description="maximum tokens of a step that uses the masked layout; 0: no step uses it",
    )
    partition: str | None = Field(
        default=None, description="name of the SM partition the layer runs in; null: the whole device"
    )
    load: bool = Field(
        default=True,
        description="whether the layer is loaded at start-up; false: only by a call (docs/operating.md)",
    )
    weights_budget: NumBytes | None = Field(
        default=None,
        description="bytes on the device for the layer's experts, as `weights_budget`, which then is for "
        "others; null: it has its share of that one",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="share of the device's time that the layer gets while it has waiting requests, in "
        "proportion to other layers that have some",
    )

    @property
    def shape(self) -> LayerShape:
        """The sizes of what is computed here. Raises ValueError for unsupported sizes."""
        return self.stored_shape if self.shared_experts else replace(self.stored_shape, num_shared_experts=0)

    @property
    def stored_shape(self) -> LayerShape:
        """The same with the shared experts, as a weights file has them. Raises ValueError."""
        local_experts = None
        if self.local_experts is not None:
            held = numbers(self.local_experts)
            local_experts = range(held[0], held[-1] + 1)
        return LayerShape(
            self.hidden_size,
            self.intermediate_size,
            self.num_experts,
            self.top_k,
            self.num_shared_experts,
            local_experts,
        )

    @model_validator(mode="after")
    def _layer_is_possible(self) -> Self:
        shape = self.shape
        self.routing.rule.check(self.num_experts, self.top_k)
        if self.masked_max_tokens and shape.is_part:
            raise ValueError(
                f"masked_max_tokens: expected 0 with local_experts, got {self.masked_max_tokens}"
            )
        return self


Requantize = Literal["allow", "always", "refuse"]


class CheckpointSettings(Frozen):
    """MoE layers of a Hugging Face checkpoint directory, each served as {name}.layers.{layer}."""

    path: Path = Field(description="directory with config.json and safetensors files")
    layers: Layers = Field(
        default="all", description="MoE layers to serve, e.g. `3`, `3-5`, `3-5,9` or `all`"
    )
    experts: Range | None = Field(
        default=None,
        description="routed experts held here, e.g. `0-63`; null: all; shared experts go with expert 0",
    )
    shared_experts: bool = Field(default=True, description="see `models.N.shared_experts`")
    name: _Name | None = Field(
        default=None,
        description="prefix of the layers' names, before `.layers.N`; null: the directory's name",
    )
    requantize: Requantize = Field(
        default="refuse",
        description="whether weights that the backend does not take as they are may be rounded to FP8 with a "
        "scale per 128x128 block (docs/numerics.md); always: four bits are, also where it takes them "
        "(docs/checkpoints.md)",
    )
    datatype: _Datatype = Field(default="BF16", description="see `models.N.datatype`")
    masked_max_tokens: int = Field(default=0, ge=0, description="see `models.N.masked_max_tokens`")
    partition: str | None = Field(default=None, description="see `models.N.partition`")
    load: bool = Field(default=True, description="see `models.N.load`")
    weights_budget: NumBytes | None = Field(
        default=None,
        description="bytes on the device for the experts of these layers together, see "
        "`models.N.weights_budget`",
    )
    weight: float = Field(default=1.0, gt=0, le=1e6, description="see `models.N.weight`")
