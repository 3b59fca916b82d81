"""The trainer. Only ever imported under torchrun."""
