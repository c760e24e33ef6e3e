"""Expert parallelism: one layer whose experts are split over the ranks of a process group."""

from expertd.service.moe.parallel.exchange import Combined, Dispatched, Exchange, ExchangeError
from expertd.service.moe.parallel.layer import ParallelLayer
from expertd.service.moe.parallel.placed import PlacedExperts
from expertd.service.moe.parallel.symmetric_layer import SymmetricLayer
from expertd.service.moe.parallel.torch_exchange import TorchExchange, join_group

__all__ = [
    "Combined",
    "Dispatched",
    "Exchange",
    "ExchangeError",
    "ParallelLayer",
    "PlacedExperts",
    "SymmetricLayer",
    "TorchExchange",
    "join_group",
]
