"""What is known of a Megatron-LM launch beside its console log.

The log tells neither tokens nor settings, and prints the mean of the first two losses as the second.
The spec, the prepared data and the launch's event files fill that in.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.data.stream import SampleStream
from dcpbench.errors import DataError
from dcpbench.megatron import events
from dcpbench.records import RunHeader
from dcpbench.spec import Model, Spec, TextData
from dcpbench.table import LaunchTable

_SAME_LOSS = 1e-3
"""Relative difference within which an event file and a log tell of the same launch; a log has seven digits."""


def completed(
    table: LaunchTable, spec: Spec, case: str, launch: str, *, folder: Path, data: Path
) -> tuple[LaunchTable, str | None]:
    """The table of a log with all that is known, and a remark where the event files cannot belong to the log.

    Args:
        table: what `parse.megatron` found.
        spec: the run's.
        case: `baseline` or `dcp`.
        launch: its id.
        folder: the launch's own folder, with `tensorboard/` where event files were written.
        data: the folder of prepared data.
    """
    columns = table.columns | _counts(table, spec, data)
    losses, remark = _exact_losses(table, folder, launch)
    if losses is not None:
        columns["loss"] = losses
    return replace(table, columns=columns, header=header(spec, case, launch)), remark


def header(spec: Spec, case: str, launch: str) -> RunHeader:
    """What a launch would say of itself if Megatron-LM wrote headers."""
    top, training, cases = spec.topology, spec.training, spec.cases
    per_token, per_square = flops(spec.model)
    text = isinstance(spec.data, TextData)
    return RunHeader(
        case=case,
        launch=launch,
        world_size=top.world_size,
        domain_size=top.domain_size,
        cp=top.cp,
        global_batch_size=training.global_batch_size,
        iterations=training.iterations,
        warmup_iterations=training.warmup_iterations,
        scheduler=cases.baseline.scheduler if case == "baseline" else cases.dcp.scheduler,
        padding=cases.padding,
        capacity=cases.max_seqlen_per_dp_cp_rank,
        device="cuda",
        dtype="bfloat16",
        attention=f"Transformer Engine {spec.megatron.attention_backend}",
        flops_per_token=None if text else per_token,
        flops_per_squared_length=None if text else per_square,
    )


def flops(model: Model) -> tuple[float, float]:
    """(FLOPs per token, FLOPs per squared length) of forward and backward, causal attention counted by half.

    Formula: Megatron-LM's for dense GPTs, with the vocabulary as given in place of the padded one.
    """
    width, queries = model.hidden_size, model.attention_heads * model.dim
    projections = width * (2 * queries + 2 * model.kv * model.dim)
    feed_forward = (3 if model.flavour == "modern" else 2) * width * model.ffn_hidden_size
    per_token = model.layers * (projections + feed_forward) + width * model.vocab_size
    return 6.0 * per_token, 6.0 * model.layers * queries


def _counts(table: LaunchTable, spec: Spec, data: Path) -> dict[str, NDArray[Any]]:
    """Tokens, squared lengths and longest sample of each record's iteration, as Megatron-LM trains on mock data.

    It feeds the first n - 1 of a sample's n tokens. Real text is tokenised by Megatron-LM, so its counts are not known.
    """
    if isinstance(spec.data, TextData):
        return {}
    try:
        stream = SampleStream.open(data)
    except DataError:
        return {}
    iteration = table.columns["iteration"]
    inside = (iteration >= 1) & (iteration <= stream.iterations)
    positions = np.arange(stream.iterations * stream.global_batch_size)
    fed = (stream.lengths(positions) - 1).reshape(stream.iterations, stream.global_batch_size)
    place = np.where(inside, iteration, 1) - 1
    counts = {
        "tokens": fed.sum(axis=1),
        "token_count": fed.sum(axis=1),
        "squared_lengths": (fed**2).sum(axis=1),
        "longest": fed.max(axis=1),
    }
    return {name: np.where(inside, values[place], -1) for name, values in counts.items()}


def _exact_losses(table: LaunchTable, folder: Path, launch: str) -> tuple[NDArray[np.float64] | None, str | None]:
    """The loss column with the values of the event files, if these are of this launch.

    A loss that the log lacks stays missing: what the log says of NaN and skipped steps stands.
    """
    exact = events.scalars(folder / "tensorboard", "lm loss")
    if not exact or not table.rows:
        return None, None
    logged = table.columns["loss"]
    values = np.array([exact.get(int(number), np.nan) for number in table.columns["iteration"]])
    known = np.isfinite(values) & np.isfinite(logged) & (table.columns["skipped"] == 0)
    if (np.abs(values[known] - logged[known]) > _SAME_LOSS * np.maximum(np.abs(logged[known]), _SAME_LOSS)).any():
        return None, f"The event files of {launch} tell other losses than its log; the log was taken."
    return np.where(known, values, logged), None
