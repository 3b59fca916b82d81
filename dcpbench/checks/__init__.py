"""What `preflight` builds on: findings, the GPUs of this machine, and whether every sample can be served."""
