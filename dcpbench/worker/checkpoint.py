"""Weights on disk, in torch.distributed.checkpoint's format: the same start for both cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from dcpbench.errors import PreflightError


def save(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes the float32 weights; collective, every rank calls it."""
    save_state({"model": dict(weights)}, checkpoint_id=path)


def load(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Reads the checkpoint into `weights`, in place; collective.

    Raises:
        PreflightError: a parameter that is missing or has another shape.
    """
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, weight in weights.items():
        found = stored.get(f"model.{name}")
        if found is None:
            raise PreflightError(f"training.load_path: the checkpoint has no parameter {name}; it is of another model")
        size = getattr(found, "size", None)
        if size is None or tuple(size) != tuple(weight.shape):
            raise PreflightError(
                f"training.load_path: parameter {name} has shape {tuple(size or ())} in the checkpoint, "
                f"{tuple(weight.shape)} in the model"
            )
    load_state({"model": dict(weights)}, checkpoint_id=path)
