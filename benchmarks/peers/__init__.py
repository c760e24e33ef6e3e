"""Other grouped GEMMs and layers than hopper's and DeepGEMM's: one file a package, each optional."""

from benchmarks.peers import cutlass, expertd_triton, sglang, torch_gemms, torch_layer, vllm_triton
from benchmarks.peers.peer import LayerPeer, Peer

PEERS: tuple[Peer, ...] = (expertd_triton.PEER, cutlass.PEER, torch_gemms.ROWWISE, torch_gemms.BF16)
LAYER_PEERS: tuple[LayerPeer, ...] = (
    expertd_triton.LAYER_PEER, sglang.TRITON, sglang.CUTLASS, vllm_triton.PEER, torch_layer.PEER,
)  # fmt: skip


__all__ = ["LAYER_PEERS", "PEERS", "LayerPeer", "Peer", "available_layer_peers", "available_peers"]


def available_peers() -> tuple[Peer, ...]:
    """The grouped GEMMs that can run here."""
    return tuple(peer for peer in PEERS if peer.available())


def available_layer_peers() -> tuple[LayerPeer, ...]:
    """The layers whose packages are installed."""
    return tuple(peer for peer in LAYER_PEERS if peer.available())
