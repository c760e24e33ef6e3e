"""`--load-format expertd`: makes a model without routed experts, and reads a checkpoint's other tensors."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from expertd_client.engine import EXPERTS, expect, tensors_of_others


class ExpertdLoader(DefaultModelLoader):
    """DefaultModelLoader without the experts."""

    counter_before_loading_weights: float

    def __init__(self, load_config: Any) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """As BaseModelLoader's. Raises ValueError for what cannot work with a server."""
        from expertd_vllm import experts

        with experts.replaced(vllm_config, model_config):
            model: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As BaseModelLoader's. Raises ValueError if the server has other experts than the checkpoint."""
        from expertd_vllm import experts

        parameters = model.named_parameters()
        left = [name for name, tensor in parameters if tensor.ndim == 3 and EXPERTS.search(name)]
        expect(not left, "load_format expertd: experts", "those of vLLM's RoutedExperts", left[:1])
        experts.check_weights(
            model,
            lambda: self._prepare_weights(model_config.model, None, model_config.revision, False, None)[0],
        )
        super().load_weights(model, model_config)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        _, files, use_safetensors, _ = self._prepare_weights(
            source.model_or_path, source.subfolder, source.revision, False, source.allow_patterns_overrides
        )
        expect(use_safetensors, "load_format expertd: files", "safetensors", files[0])
        self.counter_before_loading_weights = self.counter_before_loading_weights or time.perf_counter()
        for name, tensor in tensors_of_others(files):
            yield source.prefix + name, tensor


class DummyLoader(ExpertdLoader):
    """Gives a model random numbers, as vLLM's load format `dummy`: to measure speed without a checkpoint."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As BaseModelLoader's."""
        DummyModelLoader(LoadConfig()).load_weights(model, model_config)
