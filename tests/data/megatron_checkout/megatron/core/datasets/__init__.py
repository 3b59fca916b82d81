"""Part of a stand-in for a Megatron-LM checkout; our own text."""
