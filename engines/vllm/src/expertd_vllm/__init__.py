"""A vLLM plugin: attention in vLLM, the routed experts of MoE layers on an expertd server.

A run with `--load-format expertd`, or `expertd_dummy`, uses it; in any other it changes nothing.
"""


def register() -> None:
    """What vLLM calls in each of its processes, before there is a configuration (`vllm.general_plugins`)."""
    import logging

    from vllm.model_executor.model_loader import register_model_loader

    from expertd_vllm.loader import DummyLoader, ExpertdLoader

    register_model_loader("expertd")(ExpertdLoader)
    register_model_loader("expertd_dummy")(DummyLoader)
    # The client's messages go where vLLM's do, which may configure its logger later.
    logging.getLogger("expertd_client").parent = logging.getLogger("vllm")
