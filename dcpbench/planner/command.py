"""`dcpbench plan`: from options to figures, tables and files. Launches nothing and needs no GPU."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from dcpbench.checks.gpus import survey
from dcpbench.data.lengths import dataset_lengths
from dcpbench.data.prepare import prepare
from dcpbench.data.stream import SampleStream
from dcpbench.dcp import cost_profiles, schedulers
from dcpbench.dcp.cost_profiles import CostProfile
from dcpbench.errors import ExitCode, UsageError
from dcpbench.planner import planning, shown, sweep
from dcpbench.planner.planning import Comparison, Ground, Setting
from dcpbench.planner.sweep import Answer
from dcpbench.redact import redact, redact_value
from dcpbench.spec import Spec, TextData

NODE = 8
"""Ranks of a node where neither spec nor options say how many there are."""
_MOST_BATCHES, _MOST_SWEPT = 32, 8
_BATCH_WORK = 65_536
"""Samples and ranks that the default number of batches amounts to, so that an answer takes seconds."""


@dataclass(frozen=True)
class Question:
    """The options of `dcpbench plan`, as given; None: not given."""

    ranks: int | None = None
    nodes: int | None = None
    bandwidth: str | None = None
    samples: int | None = None
    batches: int | None = None
    seed: int | None = None
    schedulers: str | None = None
    sweep: Sequence[str] = ()
    max_tokens: int | None = None
    time_limit: float = 10.0
    out: Path | None = None


def plan(spec: Spec, question: Question, *, spec_file: Path | None = None) -> tuple[Comparison, shown.Facts]:
    """Plan what was asked for.

    Args:
        spec: model, data, topology, capacity.
        question: the options.
        spec_file: where the spec came from; beside one in a run folder lies prepared data.

    Raises:
        UsageError: an option contradicts another one or the spec, or no scheduler can serve the batches.
    """
    if not 0 < question.time_limit < float("inf"):
        raise UsageError("--time-limit must be a number of seconds above 0")
    if question.max_tokens is not None and not question.sweep:
        raise UsageError("--max-tokens decides which settings of a --sweep fit; give --sweep as well")
    names = _names(question.schedulers)
    ranks, nodes, node_size = _ranks(spec, question)
    swept = sweep.parse(question.sweep)
    profile = _profile(spec)
    cost = planning.machine(profile.cost, node_size=node_size, bandwidth=_bandwidth(question.bandwidth))
    samples = question.samples or spec.training.global_batch_size
    count = question.batches or _default_batches(spec, samples, ranks, swept=bool(swept))
    first = _first_batch(spec, question, count)
    batches = _batches(spec, samples, count, question.seed, spec_file, first)
    ground = Ground(ranks, cost, batches, spec.cases.padding, profile.iteration_seconds, spec.schedule.menu)
    configured = Setting(
        planning.FIXED,
        spec.cases.max_seqlen_per_dp_cp_rank,
        spec.topology.cp,
        spec.cases.min_dynamic_context_parallel_size,
    )
    reference = sweep.as_configured(planning.FIXED, configured)
    with _telling() as tell:
        comparison = planning.compare(
            sweep.settings(names, configured, swept),
            reference,
            ground,
            limit=question.time_limit,
            keep=not swept,
            tell=tell,
        )
    if not comparison.rows:
        reasons = "; ".join(f"{one.setting.scheduler}: {one.reason}" for one in comparison.refusals)
        raise UsageError(f"no scheduler can plan this: {reasons}")
    answer: Answer | None = None
    if swept:
        limit = question.max_tokens or configured.capacity
        answer = sweep.answer(comparison, names, configured, limit)
        comparison = _with_pictures(comparison, answer, question.time_limit)
    facts = shown.Facts(
        name=spec.name,
        nodes=nodes,
        samples=samples,
        basis=" ".join([_basis(profile), *_beyond(profile, comparison)]),
        data=_data(spec, batches, question.seed, first),
        answer=answer,
    )
    return comparison, facts


def show(spec: Spec, question: Question, *, as_json: bool, spec_file: Path | None = None) -> int:
    """`plan`, printed, and written where `--out` says."""
    comparison, facts = plan(spec, question, spec_file=spec_file)
    if question.out is not None:
        _write(question.out, comparison, facts)
    if as_json:
        document = redact_value(shown.document(comparison, facts), identity=False)
        _out(json.dumps(document, indent=2, allow_nan=False))
        return ExitCode.PASSED
    from rich.console import Console  # noqa: PLC0415 - JSON does without

    screen = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    with screen.capture() as capture:
        screen.print(shown.render(comparison, facts))
    _out(capture.get().rstrip("\n"))
    return ExitCode.PASSED


def _write(folder: Path, comparison: Comparison, facts: shown.Facts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in shown.files(comparison, facts):
        (folder / name).write_bytes(content if isinstance(content, bytes) else redact(content).encode())
        sys.stderr.write(f"dcpbench: wrote {folder / name}\n")


def _names(given: str | None) -> list[str]:
    """The schedulers to compare, each once."""
    if given is None:
        return list(schedulers.SCHEDULERS)
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--schedulers names none; there are {', '.join(schedulers.SCHEDULERS)}")
    return list(dict.fromkeys(names))


def _ranks(spec: Spec, question: Question) -> tuple[int, int, int]:
    """Ranks of the DPxCP domain, nodes, ranks of a node."""
    own, cp = spec.topology, spec.topology.cp
    ranks = question.ranks or own.domain_size
    if ranks % cp:
        raise UsageError(
            f"{ranks} ranks cannot be divided into CP groups of {cp}; change --ranks, or the fixed CP size with "
            "--set topology.cp=..."
        )
    if question.nodes is not None:
        if ranks % question.nodes:
            raise UsageError(f"--nodes {question.nodes} does not divide {ranks} ranks evenly")
        return ranks, question.nodes, ranks // question.nodes
    if question.ranks is None:
        return ranks, own.nodes, max(1, ranks // own.nodes)
    size = min(ranks, NODE)
    return ranks, -(-ranks // size), size


def _bandwidth(text: str | None) -> tuple[float, float] | None:
    """(within a node, between nodes) in bytes per second, from `400` or `400,50` in GB/s."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    number = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
    if len(parts) > 2 or not all(number.fullmatch(part) and float(part) > 0 for part in parts):
        raise UsageError(
            f"--bandwidth {text}: give GB/s within a node, or within and between nodes, for example 400,50"
        )
    return 1e9 * float(parts[0]), 1e9 * float(parts[-1])


def _profile(spec: Spec) -> CostProfile:
    """The cost profile for this machine's GPUs or, where there are none, for any GPU that was measured."""
    gpus = survey(os.environ).gpus
    if spec.topology.device == "cpu":
        return cost_profiles.resolve(spec, "cpu")
    if gpus or spec.schedule.costs != "auto":
        return cost_profiles.resolve(spec, gpus[0].model if gpus else "")
    folders = (cost_profiles.user_folder(), cost_profiles.SHIPPED)
    measured = {one.key.gpu: None for one in cost_profiles.profiles(folders) if one.key is not None}
    for gpu in measured:
        found = cost_profiles.resolve(spec, gpu)
        if found.kind == "measured" and gpu != "cpu":
            return found
    return cost_profiles.assumed(spec)


def _basis(profile: CostProfile) -> str:
    """One line: what the figures rest on."""
    if profile.kind == "measured":
        gpu = profile.key.gpu if profile.key else "unknown"
        error = f", mean error {profile.fit.mape:.1%} on {profile.fit.of} held out" if profile.fit else ""
        return f"The times rest on the measured profile {profile.name} ({gpu}{error})."
    return (
        f"The times rest on the assumed profile {profile.name}: data-sheet rates, nothing measured; "
        "dcpbench calibrate measures your GPUs."
    )


def _beyond(profile: CostProfile, comparison: Comparison) -> Iterator[str]:
    """What of the plans lies outside of what a measured profile was fitted to."""
    if profile.kind != "measured" or profile.fit is None:
        return
    most, peak = profile.fit.most_tokens, max(row.peak_tokens for row in comparison.rows)
    if most is not None and peak > most:
        yield (
            f"Microbatches of up to {peak:,} tokens a rank are outside of what was measured, at most {most:,}: their "
            "times are extrapolated."
        )
    sizes = profile.fit.sizes
    largest = max((size for row in comparison.rows for size in row.jobs_by_size), default=1)
    if sizes and largest > max(sizes):
        yield f"CP sizes up to {largest} are used, and were measured up to {max(sizes)}: the rest is extrapolated."


def _default_batches(spec: Spec, samples: int, ranks: int, *, swept: bool) -> int:
    """As many as a run would measure, or fewer so that an answer takes seconds."""
    measured = spec.training.iterations - spec.training.warmup_iterations
    most = _MOST_SWEPT if swept else _MOST_BATCHES
    return max(1, min(most, measured, _BATCH_WORK // (samples + 4 * ranks)))


def _first_batch(spec: Spec, question: Question, count: int) -> int:
    """Batches to pass over: a run's warm-up, so that a plan is of what the run measures, if it has so many."""
    warmup = spec.training.warmup_iterations
    own = question.seed is None and question.samples in (None, spec.training.global_batch_size)
    return warmup if own and warmup + count <= spec.training.iterations else 0


def _batches(
    spec: Spec, samples: int, count: int, seed: int | None, spec_file: Path | None, first: int
) -> tuple[tuple[int, ...], ...]:
    """Lengths of batches of a run after passing over `first` of them; with a seed, of samples drawn at random."""
    wanted = samples * count
    lengths = _lengths(spec, samples * (first + count), spec_file)
    if seed is None:
        taken = lengths[(samples * first + np.arange(wanted)) % lengths.size]
    else:
        taken = np.random.RandomState(seed).choice(lengths, wanted)
    return tuple(tuple(batch) for batch in taken.reshape(count, samples).tolist())


def _lengths(spec: Spec, wanted: int, spec_file: Path | None) -> NDArray[np.int64]:
    """Lengths of the dataset in its order; of text, of as many samples as are wanted."""
    if not isinstance(spec.data, TextData):
        return dataset_lengths(spec.data)
    if spec_file is not None and (spec_file.parent / "data" / "data.json").is_file():
        prepare(spec, spec_file.parent / "data")  # refuses what was prepared for another request
        stream = SampleStream.open(spec_file.parent / "data")
        return stream.lengths(np.arange(stream.samples))
    training = spec.training.model_copy(update={"global_batch_size": wanted, "iterations": 1})
    with TemporaryDirectory(prefix="dcpbench-plan-") as scratch:
        prepare(spec.model_copy(update={"training": training}), Path(scratch) / "data")
        stream = SampleStream.open(Path(scratch) / "data")
        return stream.lengths(np.arange(stream.samples))


def _data(spec: Spec, batches: tuple[tuple[int, ...], ...], seed: int | None, first: int) -> str:
    shortest, longest = min(map(min, batches)), max(map(max, batches))
    path = getattr(spec.data, "path", None)
    source = path.name if path is not None else spec.data.kind
    how = "the first of the run" if not first else f"those of the run after {first} for warm-up"
    how = how if seed is None else f"drawn with seed {seed}"
    number = "one batch" if len(batches) == 1 else f"{len(batches)} batches"
    return f"{number} of {len(batches[0]):,} samples of {shortest:,} to {longest:,} tokens ({source}, {how})"


def _with_pictures(comparison: Comparison, answer: Answer, limit: float) -> Comparison:
    """With the first batch of fixed CP as configured and of every scheduler at its best, planned again."""
    ground = comparison.ground
    first = replace(ground, batches=ground.batches[:1])
    wanted = [comparison.configured, *(choice.best or choice.configured for choice in answer.choices)]
    found = [
        planning.evaluate(setting, first, limit) for setting in dict.fromkeys(one.setting for one in wanted if one)
    ]
    kept = tuple(one for one in found if isinstance(one, planning.Evaluated))
    return replace(comparison, pictured=kept)


@contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being planned; elsewhere nothing, as it takes seconds."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        yield lambda what: print(f"\r\033[Kplanning: {what}"[:100], end="", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        sys.stderr.write("\r\033[K")


def _out(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
