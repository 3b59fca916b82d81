"""Whether the schedulers of both cases can serve this data: its longest sample and every batch of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dcpbench.checks.findings import Finding, ok, refuse, warn
from dcpbench.dcp import schedulers
from dcpbench.dcp.workload import Scheduler
from dcpbench.errors import ScheduleError, SpecError
from dcpbench.spec import Spec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_PLANNING_BUDGET = 4_000_000
"""Samples x ranks that are planned beforehand, a matter of seconds. Larger runs are planned in part."""


class Stream(Protocol):
    """What preflight asks of the prepared data; see `data.stream.SampleStream`."""

    global_batch_size: int
    iterations: int

    @property
    def samples(self) -> int:
        """Distinct samples."""

    def batch(self, iteration: int) -> NDArray[Any]:
        """Stream positions of an iteration, from 1."""

    def sample_ids(self, positions: ArrayLike) -> NDArray[Any]:
        """The dataset's sample at each position."""

    def lengths(self, positions: ArrayLike) -> NDArray[Any]:
        """Tokens of the sample at each position."""


def servable(spec: Spec, stream: Stream | None) -> list[Finding]:
    """What the schedulers say to a spec and, where there are data, to every iteration's batch."""
    findings: list[Finding] = []
    cases = _schedulers(spec, findings)
    if stream is None:
        return findings
    fits = list(_longest(spec, stream, cases))
    findings += fits
    if len(cases) == 2 and all(finding.level != "refuse" for finding in fits):
        findings += _plans(stream, cases)
    return [*findings, *_repeats(spec, stream)]


def _schedulers(spec: Spec, findings: list[Finding]) -> dict[str, Scheduler]:
    """The scheduler of each case that can be made; a reason in `findings` for one that cannot."""
    made: dict[str, Scheduler] = {}
    for case in ("baseline", "dcp"):
        try:
            made[case] = schedulers.of_case(spec, case)
        except (ScheduleError, SpecError) as error:
            findings.append(refuse("scheduler", f"cases.{case}: {error}"))
    return made


def _longest(spec: Spec, stream: Stream, cases: Mapping[str, Scheduler]) -> Iterator[Finding]:
    positions, lengths = _window(stream)
    place = int(lengths.argmax())
    longest, sample = int(lengths[place]), int(stream.sample_ids(positions[place : place + 1])[0])
    capacity = spec.cases.max_seqlen_per_dp_cp_rank
    for case, scheduler in cases.items():
        size = scheduler.group_sizes()[-1]
        usable, limit = scheduler.longest_sample(), size * capacity
        if longest > usable:
            padded = (
                f", of which the usable length is {usable} because samples are padded to a multiple of "
                f"{scheduler.padding.multiple(size)}"
                if usable < limit
                else ""
            )
            yield refuse(
                "longest sample",
                f"sample {sample} has {longest} tokens, but the {case} case holds at most {limit} ({size} ranks x "
                f"max_seqlen_per_dp_cp_rank {capacity}){padded}; raise the capacity or shorten the samples",
            )
        else:
            yield ok("longest sample", f"the longest sample, {longest} tokens, fits the {case} case ({usable})")
    rows = spec.model.max_position_embeddings
    if spec.model.flavour == "classic" and rows is not None and longest > rows:
        yield refuse(
            "positions",
            f"sample {sample} has {longest} tokens, but model.max_position_embeddings is {rows}; raise it",
        )


def _window(stream: Stream) -> tuple[NDArray[Any], NDArray[Any]]:
    """Every stream position of a launch, and its length."""
    import numpy as np  # noqa: PLC0415 - only where there are data

    positions = np.arange(stream.iterations * stream.global_batch_size)
    return positions, stream.lengths(positions)


def _plans(stream: Stream, cases: Mapping[str, Scheduler]) -> Iterator[Finding]:
    """Plan the run's batches with both schedulers, so that none fails when the GPUs are already busy."""
    chosen = _iterations_to_plan(stream, max(cases["dcp"].group_sizes()))
    used: dict[str, set[int]] = {}
    for case, scheduler in cases.items():
        used[case] = set()
        for iteration in chosen:
            try:
                plan = scheduler.plan([int(length) for length in stream.lengths(stream.batch(iteration))])
            except ScheduleError as error:
                yield refuse("plan", f"iteration {iteration} of the {case} case cannot be scheduled: {error}")
                break
            used[case].update(plan.cp_sizes())
    count = "all" if len(chosen) == stream.iterations else f"{len(chosen)} of"
    sizes = ", ".join(map(str, sorted(used["dcp"])))
    yield ok("plan", f"{count} {stream.iterations} iterations planned; the dcp case uses CP {sizes}")


def _iterations_to_plan(stream: Stream, ranks: int) -> list[int]:
    """All iterations where that is cheap; else the first, the one with the longest sample, and others evenly."""
    affordable = max(2, _PLANNING_BUDGET // (stream.global_batch_size * ranks))
    if affordable >= stream.iterations:
        return list(range(1, stream.iterations + 1))
    longest = int(_window(stream)[1].argmax()) // stream.global_batch_size + 1
    step = -(-stream.iterations // affordable)
    return sorted({*range(1, stream.iterations + 1, step), longest})


def _repeats(spec: Spec, stream: Stream) -> Iterator[Finding]:
    draws = stream.iterations * stream.global_batch_size
    if stream.samples < draws and spec.data.kind in ("text", "csv"):
        yield warn("repeats", f"the data have {stream.samples} samples and a launch takes {draws}: samples repeat")
    longest = int(_window(stream)[1].max())
    if getattr(spec.data, "tokens", None) == "counting" and longest > spec.model.vocab_size:
        yield warn(
            "vocabulary",
            f"counting tokens start again at 1 in samples longer than model.vocab_size {spec.model.vocab_size}; "
            "Megatron-LM's mock would fail there",
        )
