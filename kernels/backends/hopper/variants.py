"""The closed list of all variants, used by warm-up, `expertd kernels` and the tests."""

from expertd.kernels.backends.hopper import (
    combine_rows,
    compute_permutation,
    device_calls,
    dispatch_rows,
    few_pairs_of_ranks,
    gather_rows,
    grouped_gemm,
    permutation_of_ranks,
    permute_rows,
    quantize_permute,
    route_tokens,
    router_logits,
    scatter_rows,
    unpermute_rows,
)

VARIANTS = (
    *grouped_gemm.VARIANTS.values(),
    compute_permutation.VARIANT,
    few_pairs_of_ranks.VARIANT,
    *permutation_of_ranks.VARIANTS,
    *quantize_permute.VARIANTS.values(),
    quantize_permute.CALLS,
    permute_rows.VARIANT,
    *unpermute_rows.VARIANTS.values(),
    *unpermute_rows.BIASED.values(),
    *unpermute_rows.CALLS,
    router_logits.VARIANT,
    *route_tokens.VARIANTS.values(),
    gather_rows.VARIANT,
    scatter_rows.VARIANT,
    scatter_rows.CALLS,
    device_calls.TAKE,
    *dispatch_rows.VARIANTS,
    *combine_rows.VARIANTS,
)
