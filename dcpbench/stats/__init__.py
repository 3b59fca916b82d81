"""Arrays in, dataclasses out: numpy and scipy only."""
