"""The run folder: where its files lie, what was planned and what really happened, and what earlier runs left."""
