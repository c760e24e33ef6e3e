"""Model types that are known and not served, each with the reason in one sentence."""

REFUSED = {
    "gemma4": "experts use gelu, and the router has scales of its own for its input and for each expert",
    "nemotron_h": "experts use relu2 without a gate, some of them in a latent space",
    "longcat_flash": "some experts are identities without weights",
    "kimi_k3": "experts work in a latent space",
    "deepseek_ref": "its config.json leaves out the scaling factor of the routing weights",
    "dbrx": "experts of all layers are stacked in one matrix",
}
