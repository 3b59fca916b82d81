"""Megatron-LM as a runner: a spec as its arguments, its environment, what its checkout must be able to do."""
