"""Part of a stand-in for a Megatron-LM checkout; our own text."""

SCHEDULERS = ("dp_balanced", "default_dynamic_cp")
