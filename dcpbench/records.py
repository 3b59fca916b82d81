"""What a launch reports: one header, one record per iteration, one end mark.

Workers write these as strict JSON lines (`records.jsonl`) at full float precision; parsers of
console logs produce the same records. A quantity that is absent or not finite is null in the
file and None here, and `problems` says why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

_LARGEST_INT = 2**63
_ITERATION = re.compile(r'"iteration":(\d{1,18})\b')


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What stays the same during a launch.

    `flops_per_token` and `flops_per_squared_length` are the coefficients of the model FLOPs of an
    iteration, `flops_per_token * sum(L) + flops_per_squared_length * sum(L**2)` over real lengths.
    """

    case: str
    launch: str
    world_size: int
    domain_size: int
    cp: int
    global_batch_size: int
    iterations: int
    mode: str | None = None
    """`lockstep` where the launch computes both cases; then each case has a header."""
    warmup_iterations: int | None = None
    scheduler: str | None = None
    costs: str | None = None
    """The cost profile that the scheduler plans with, if it plans with one: `measured profile NAME`, ..."""
    padding: str | None = None
    capacity: int | None = None
    device: str | None = None
    dtype: str | None = None
    attention: str | None = None
    flops_per_token: float | None = None
    flops_per_squared_length: float | None = None
    parameters: int | None = None
    cp_sizes: tuple[int, ...] = ()
    group_memory_bytes: int | None = None
    parameter_bytes: int | None = None
    """On one rank: weights in the compute type and, where it is another type, in float32."""
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """One optimizer step over one global batch.

    `tokens` are real tokens (no padding) and `token_count` those that carry loss; `seconds` is the
    slowest rank's step time and `rank_seconds` every rank's. `consumed_*` are totals since
    iteration 1, this iteration included. Only `iteration` is always there: a console log of
    another program may lack the rest.
    """

    iteration: int
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    samples: int | None = None
    tokens: int | None = None
    padding_tokens: int | None = None
    squared_lengths: int | None = None
    longest: int | None = None
    loss: float | None = None
    loss_sum: float | None = None
    token_count: int | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    rank_seconds: tuple[float, ...] = ()
    scheduling_seconds: float | None = None
    microbatches: int | None = None
    cp_sizes: dict[int, int] = field(default_factory=dict)
    batch_digest: str | None = None
    peak_memory_bytes: int | None = None
    """The most that one rank had allocated up to the end of the iteration."""
    reserved_memory_bytes: int | None = None
    """The most that the allocator of one rank held, free blocks included."""
    tflops_per_gpu: float | None = None
    ended: float | None = None
    """When rank 0 had finished the iteration, in seconds since 1970 (UTC): places it among telemetry samples."""
    jobs: tuple[int, ...] = ()
    """The plan, in execution order, four numbers a microbatch: first rank, ranks, padded tokens, and the sum of the
    squared real lengths of its samples."""
    case: str | None = None
    """In lockstep only, as the fields that follow: the case that this record is of."""
    order: int | None = None
    """Place of the case in the iteration, 1 or 2."""
    pass_seconds: float | None = None
    """The slowest rank's forward, backward and reduction; `seconds` has the update besides."""
    update_seconds: float | None = None
    """The slowest rank's optimizer step, which both cases share."""
    gradient_difference: float | None = None
    """Norm of the difference of both cases' gradients over the baseline's norm, estimated from their sketches."""
    gradient_segment: str | None = None
    """Where in the model the gradients differ most, relative to their size: `blocks.3`, `output`, ..."""
    gradient_sketch: tuple[float, ...] = ()
    """Random projection of the case's gradient, the same for both cases and all iterations."""
    skipped: bool = False
    problems: tuple[str, ...] = ()
    line: int | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Written last, and only by a worker that finished every iteration."""

    iterations: int
    seconds: float
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Malformed:
    """A line that looked like a record and was none."""

    line: int
    """Physical line of the file, counted from 1."""
    message: str
    iteration: int | None = None
    """The iteration it would have recorded, where that much can be read."""


@dataclass(frozen=True)
class LaunchRecords:
    """All that one launch reported, in the order in which it was written."""

    header: RunHeader | None
    """The first header; see `headers`."""
    iterations: tuple[IterationRecord, ...]
    end: RunEnd | None = None
    malformed: tuple[str, ...] = ()
    """One sentence, with the line number, for each line that looked like a record and was none."""
    headers: tuple[RunHeader, ...] = ()
    """Every header: one, or in lockstep one for each case."""


def second_header(known: Sequence[RunHeader], header: RunHeader) -> bool:
    """Whether a further header belongs to another launch; in lockstep the other case's does not."""
    return bool(known) and (header.mode != "lockstep" or header.case in {other.case for other in known})


_KINDS: dict[str, type[RunHeader] | type[IterationRecord] | type[RunEnd]] = {
    "header": RunHeader,
    "iteration": IterationRecord,
    "end": RunEnd,
}


def to_json(record: RunHeader | IterationRecord | RunEnd) -> str:
    """One strict JSON line (without newline). Non-finite floats become null and are named in `problems`."""
    data: dict[str, Any] = asdict(record)
    problems: list[str] = []
    for key, value in data.items():
        values = value if isinstance(value, tuple) else (value,)
        bad = next((v for v in values if isinstance(v, float) and not math.isfinite(v)), None)
        if bad is not None:
            problems.append(f"{key} is {bad}")
            data[key] = () if isinstance(value, tuple) else None
    if problems:
        data["problems"] = (*data.get("problems", ()), *problems)
    kind = next(name for name, cls in _KINDS.items() if type(record) is cls)
    return json.dumps({"kind": kind, **data}, allow_nan=False, separators=(",", ":"))


def from_json(line: str) -> RunHeader | IterationRecord | RunEnd:
    """The record of one JSON line. Unknown keys of a newer minor version are ignored.

    Raises:
        ValueError: the line is not JSON, not a record, of another schema version, or a value has the wrong type.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not a whole JSON record; the line is torn or from another writer") from None
    if not isinstance(data, dict) or data.get("kind") not in _KINDS:
        raise ValueError("not a dcpbench record")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"record schema version {data.get('schema_version')}; this dcpbench reads {SCHEMA_VERSION}")
    return _build(_KINDS[data["kind"]], data)


def _build(
    cls: type[RunHeader] | type[IterationRecord] | type[RunEnd], data: Mapping[str, Any]
) -> RunHeader | IterationRecord | RunEnd:
    values: dict[str, Any] = {}
    for f in fields(cls):
        if f.name not in data:
            continue
        value = data[f.name]
        kind = str(f.type)
        if not _has_type(value, kind):
            raise ValueError(f"{f.name} is not of type {kind}")
        if kind.startswith("tuple"):
            value = tuple(value)
        elif kind == "dict[int, int]":
            value = {int(size): count for size, count in value.items()}
        values[f.name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"incomplete record: {error}") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_INT


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "int": _is_int,
    "float": lambda value: _is_int(value) or (isinstance(value, float) and math.isfinite(value)),
    "dict[int, int]": lambda value: (
        isinstance(value, dict) and all(key.isdecimal() and _is_int(count) for key, count in value.items())
    ),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
}


def _has_type(value: Any, kind: str) -> bool:
    """Whether a JSON value fits a field's annotation."""
    if kind.endswith(" | None"):
        return value is None or _has_type(value, kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, list) and all(_has_type(element, item) for element in value)
    return _CHECKS[kind](value)


def stream(path: Path) -> Iterator[tuple[int, RunHeader | IterationRecord | RunEnd | Malformed]]:
    """(line number, record) for each line of a `records.jsonl`; a torn or foreign line is a `Malformed`."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, from_json(line)
            except ValueError as error:
                match = _ITERATION.search(line)
                yield number, Malformed(number, str(error), int(match[1]) if match else None)


def read(path: Path) -> LaunchRecords:
    """Everything in a `records.jsonl`; a torn or foreign line lands in `malformed`, it does not stop the reading."""
    headers: list[RunHeader] = []
    iterations: list[IterationRecord] = []
    end: RunEnd | None = None
    malformed: list[str] = []
    for number, record in stream(path):
        if isinstance(record, Malformed):
            malformed.append(f"line {number}: {record.message}")
        elif isinstance(record, RunHeader):
            if second_header(headers, record):
                malformed.append(f"line {number}: second header; the file holds more than one launch")
            headers.append(record)
        elif isinstance(record, IterationRecord):
            iterations.append(record)
        else:
            end = record
    return LaunchRecords(headers[0] if headers else None, tuple(iterations), end, tuple(malformed), tuple(headers))


class GrowingFile:
    """The whole lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[bytes]:
        """Lines that have been finished since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        return whole.split(b"\n") if whole else []


def console_header(header: RunHeader) -> str:
    """The launch header as a console line; `parse.native` reads it back."""
    return "dcpbench header " + to_json(header)


def console_line(record: IterationRecord, iterations: int) -> str:
    """One line that a person can read and `parse.native` reads back.

    After `dcpbench iteration I/N` come ` | `-separated `name: value` fields; what the record lacks is
    left out. `steps skipped` is always there and always last, so that a torn line shows. The loss has nine
    significant digits: enough for a comparison at 1e-8 relative.
    """
    parts = [f"dcpbench iteration {record.iteration}/{iterations}"]

    def add(name: str, value: object, form: str = "") -> None:
        if value is not None:
            parts.append(f"{name}: {value:{form}}")

    add("loss", record.loss, ".9g")
    add("time ms", None if record.seconds is None else 1e3 * record.seconds, ".3f")
    add("tokens", record.tokens)
    add("consumed samples", record.consumed_samples)
    add("consumed tokens", record.consumed_tokens)
    add("samples", record.samples)
    add("grad norm", record.grad_norm, ".6g")
    add("lr", record.learning_rate, ".6g")
    add("padding", record.padding_tokens)
    add("longest", record.longest)
    add("loss tokens", record.token_count)
    add("squared lengths", record.squared_lengths)
    add("microbatches", record.microbatches)
    add("cp", cp_text(record.cp_sizes) or None)
    add("schedule ms", None if record.scheduling_seconds is None else 1e3 * record.scheduling_seconds, ".3f")
    add("memory MiB", None if record.peak_memory_bytes is None else record.peak_memory_bytes / 2**20, ".1f")
    add("TFLOP/s/GPU", record.tflops_per_gpu, ".4g")
    add("digest", record.batch_digest)
    add("case", record.case)
    add("order", record.order)
    add("pass ms", None if record.pass_seconds is None else 1e3 * record.pass_seconds, ".3f")
    add("update ms", None if record.update_seconds is None else 1e3 * record.update_seconds, ".3f")
    add("gradient difference", record.gradient_difference, ".6g")
    add("most in", record.gradient_segment)
    add("steps skipped", int(record.skipped))
    return " | ".join(parts) + " |"


def console_end(end: RunEnd) -> str:
    """The end mark as a console line; `parse.native` reads it back."""
    return f"dcpbench end | {end.iterations} iterations in {end.seconds:.1f} s |"


def cp_text(cp_sizes: Mapping[int, int]) -> str:
    """A histogram of CP sizes in one word: `1x6,2x3` is six groups of one rank and three of two."""
    return ",".join(f"{size}x{count}" for size, count in sorted(cp_sizes.items()))
