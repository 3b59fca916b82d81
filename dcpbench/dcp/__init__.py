"""The packaged scheduler stack: who computes what, in groups of which size, and how it is packed."""
