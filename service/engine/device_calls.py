"""Calls that GPUs of callers make by themselves, which this process's GPU answers between other steps."""

import threading
from collections.abc import Mapping, Sequence

from expertd.device_calls import CallCounts, CallSlot
from expertd.service.device import Device
from expertd.service.engine.errors import ModelUnloadedError
from expertd.service.memory import SharedMemory
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.step.calls import MAX_CALL_TOKENS, CallSteps, why_not


class DeviceCalls:
    """Those to the layers of `runners`. Between steps, on the worker thread, unless `CallServer` says so.

    Implements `CallServer`.
    """

    max_tokens = MAX_CALL_TOKENS

    def __init__(self, device: Device, runners: Mapping[str, LayerRunner]) -> None:
        self._device, self._runners = device, runners
        self.gpu = "".join(device.uuids())
        self.own_gpu = "mps" if device.is_shared_at_once else "turns"
        self._steps: CallSteps | None = None  # once there is a caller
        self._lock, self._holds = threading.Lock(), 0

    @property
    def are_made(self) -> bool:
        """See `Calls`."""
        return self._steps is not None and self._steps.are_made

    def start(self) -> bool:
        """See `Calls`."""
        if self._steps is None:
            return True
        if self._holds:
            self._steps.run()
            return not self._steps.are_made
        self._steps.start()
        return True

    def hold(self) -> None:
        """See `Calls`."""
        with self._lock:
            self._holds += 1

    def let_go(self) -> None:
        """See `Calls`."""
        with self._lock:
            self._holds -= 1

    def stop(self) -> None:
        """See `Calls`."""
        if self._steps is not None:
            self._steps.stop()

    def run(self) -> None:
        """See `Calls`."""
        if self._steps is not None:
            self._steps.run()

    def answers(self, model: str) -> bool:
        """See `CallServer`."""
        runner = self._runners.get(model)
        return runner is not None and why_not(runner.layer) is None

    def prepare(self, model: str) -> None:
        """See `CallServer`."""
        runner = self._runners.get(model)
        if runner is None:
            raise ModelUnloadedError(f"model {model}: expected a loaded one, got it unloaded")
        if (why := why_not(runner.layer)) is not None:
            raise ValueError(f"memory: model {model}: {why}")
        self._steps = self._steps or CallSteps(self._device)
        self._steps.add(model, runner.layer, runner.num_sms)

    def share(self, num_bytes: int) -> SharedMemory:
        """See `CallServer`."""
        return self._device.share(num_bytes)

    def connect(self, models: tuple[str, ...], slots: Sequence[CallSlot]) -> list[int]:
        """See `CallServer`."""
        assert self._steps is not None
        return self._steps.open(slots, models)

    def open_shared(self, descriptor: int, num_bytes: int) -> SharedMemory:
        """See `CallServer`."""
        return self._device.open_shared(descriptor, num_bytes)

    def disconnect(self, indices: Sequence[int], *memories: SharedMemory) -> None:
        """See `CallServer`."""
        if self._steps is not None:
            self._steps.close(indices)
        for memory in memories:
            memory.close()

    def forget(self, model: str) -> None:
        """See `CallServer`."""
        if self._steps is not None:
            self._steps.remove(model)

    def counts(self) -> Mapping[str, CallCounts]:
        """See `CallServer`."""
        return {} if self._steps is None else self._steps.counts()

    def num_calls(self, index: int) -> int:
        """See `CallServer`."""
        return 0 if self._steps is None else self._steps.num_calls(index)

    def has_fault(self, indices: Sequence[int]) -> bool:
        """See `CallServer`."""
        return self._steps is not None and self._steps.has_fault(indices)
