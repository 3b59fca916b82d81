"""Context-parallel attention on packed sequences.

layout         which rows see which, on the device
kernels        attention on one rank: FlashAttention, scaled-dot-product, the definition
cudnn          the same by cuDNN's fused kernels; cudnn_graphs compiles them
transport      keys and values to the ranks of a group and gradients back, by collectives
mapped         buffers that ranks read from each other, and when one may be written
symmetric      the same as transport by reading peers' memory over NVLink
gathered       kernel and transport together, as a function of q, k and v
overlapped     the same for long sequences, with communication behind computation
te             Transformer Engine's attention and its own communication
backend        which of them a launch uses
"""
