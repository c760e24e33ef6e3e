"""The method of a FusedMoE without weights: SGLang's router chooses the experts, a server computes them."""

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import is_cuda

from expertd_client.engine import RemoteLayer, expect


class ExpertdFusedMoEMethod(FusedMoEMethodBase):
    """Takes the place of what the checkpoint's quantization has: no weights, and `apply` calls the server."""

    def __init__(self, remote: RemoteLayer) -> None:
        self.remote = remote
        self._factor: float | None = None

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """None."""

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """None. On CUDA, a runner multiplies its outputs by the layer's factor; elsewhere the model does."""
        self._factor = moe_runner_config.routed_scaling_factor if is_cuda() else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """There are none; but all layers are known."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.remote.server.open_device_channel(device, num_slots=1)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """This rank's share of the tokens, and zeros for the others, as SGLang adds up all ranks' outputs."""
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(topk):
            topk = topk.to_standard()
        expect(
            TopKOutputChecker.format_is_standard(topk), "topk_output", "ids and weights", type(topk).__name__
        )
        rank, ranks = layer.moe_tp_rank, layer.moe_tp_size
        rows = slice(len(x) * rank // ranks, len(x) * (rank + 1) // ranks)
        num_tokens, out = rows.stop - rows.start, torch.empty_like(x)
        out[: rows.start].zero_()
        out[rows.stop :].zero_()
        if num_tokens:
            self._check_capture(num_tokens)
            weights = topk.topk_weights[rows]
            if self._factor is not None:
                weights = weights * self._factor
            self.remote.submit(x[rows], topk.topk_ids[rows], weights, 0, 1).wait(out[rows])
        return StandardCombineInput(hidden_states=out)

    def _check_capture(self, num_tokens: int) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            calls = self.remote.server.device_channel
            max_tokens = calls.max_tokens if calls is not None else 0
            expect(
                num_tokens <= max_tokens,
                "tokens of a CUDA graph",
                f"at most {max_tokens} (--cuda-graph-bs-decode)",
                num_tokens,
            )
