"""Expert parallelism: one layer whose experts are split over ranks."""

from expertd.service.moe.parallel.exchange import Combined, Dispatched, Exchange, ExchangeError
from expertd.service.moe.parallel.layer import MakeStore, ParallelLayer
from expertd.service.moe.parallel.placed import PlacedExperts
from expertd.service.moe.parallel.routed import JointExchange
from expertd.service.moe.parallel.torch_exchange import TorchExchange, join_group

__all__ = [
    "Combined",
    "Dispatched",
    "Exchange",
    "ExchangeError",
    "JointExchange",
    "MakeStore",
    "ParallelLayer",
    "PlacedExperts",
    "TorchExchange",
    "join_group",
]
