"""Part of a stand-in for a Megatron-LM checkout; our own text."""

FIELDS = (
    "max_seqlen_per_dp_cp_rank",
    "dynamic_context_parallel",
    "min_dynamic_context_parallel_size",
    "sequence_packing_scheduler",
)
"""Fields of a dataclass from which the real one makes its flags."""
