"""The closed list of all variants, used by warm-up, `expertd kernels` and the tests."""

from expertd.kernels.backends.hopper import (
    compute_permutation,
    grouped_gemm,
    quantize_permute,
    route_tokens,
    router_logits,
    unpermute_rows,
)

VARIANTS = (
    *grouped_gemm.VARIANTS.values(),
    compute_permutation.VARIANT,
    *quantize_permute.VARIANTS.values(),
    *unpermute_rows.VARIANTS.values(),
    router_logits.VARIANT,
    route_tokens.VARIANT,
)
