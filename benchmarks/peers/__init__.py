"""Other grouped GEMMs than ours and DeepGEMM's (`deep_gemm_peer`): one file each, each optional."""

from benchmarks.peers import cutlass, torch_bf16, torch_rowwise
from benchmarks.peers.peer import Peer

PEERS: tuple[Peer, ...] = (cutlass.PEER, torch_rowwise.PEER, torch_bf16.PEER)


__all__ = ["PEERS", "Peer", "available_peers"]


def available_peers() -> tuple[Peer, ...]:
    """Those that can run here."""
    return tuple(peer for peer in PEERS if peer.available())
