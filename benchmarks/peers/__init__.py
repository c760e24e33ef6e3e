"""Other grouped GEMMs and layers than ours and DeepGEMM's: one file each, each optional."""

from benchmarks.peers import (
    cutlass,
    sglang_cutlass,
    sglang_triton,
    torch_bf16,
    torch_layer,
    torch_rowwise,
    vllm_triton,
)
from benchmarks.peers.layer_peer import LayerPeer
from benchmarks.peers.peer import Peer

PEERS: tuple[Peer, ...] = (cutlass.PEER, torch_rowwise.PEER, torch_bf16.PEER)
LAYER_PEERS: tuple[LayerPeer, ...] = (
    sglang_triton.PEER,
    sglang_cutlass.PEER,
    vllm_triton.PEER,
    torch_layer.PEER,
)


__all__ = ["LAYER_PEERS", "PEERS", "LayerPeer", "Peer", "available_layer_peers", "available_peers"]


def available_peers() -> tuple[Peer, ...]:
    """The grouped GEMMs that can run here."""
    return tuple(peer for peer in PEERS if peer.available())


def available_layer_peers() -> tuple[LayerPeer, ...]:
    """The layers whose packages are installed."""
    return tuple(peer for peer in LAYER_PEERS if peer.available())
