"""HTTP: the protocol, the routes and the server that carries them. Moves bytes, never tensors."""
