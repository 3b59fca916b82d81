"""Triton kernels of the trainer: one pass over memory where eager torch needs several. Only imported on CUDA."""
