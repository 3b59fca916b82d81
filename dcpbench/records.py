"""What a launch reports: one header, one record per iteration, one end mark.

Workers write these as strict JSON lines (`records.jsonl`) at full float precision; parsers of
console logs produce the same records. A quantity that is absent or not finite is null in the
file and None here, and `problems` says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


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
    warmup_iterations: int | None = None
    scheduler: str | None = None
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
    tflops_per_gpu: float | None = None
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
class LaunchRecords:
    """All that one launch reported, in the order in which it was written."""

    header: RunHeader | None
    iterations: tuple[IterationRecord, ...]
    end: RunEnd | None = None
    malformed: tuple[str, ...] = ()
    """One sentence, with the line number, for each line that looked like a record and was none."""


_KINDS: dict[str, type[RunHeader] | type[IterationRecord] | type[RunEnd]] = {
    "header": RunHeader,
    "iteration": IterationRecord,
    "end": RunEnd,
}


def to_json(record: RunHeader | IterationRecord | RunEnd) -> str:
    """One strict JSON line (without newline). Non-finite floats become null and are named in `problems`."""
    data: dict[str, Any] = asdict(record)
    bad = [key for key, value in data.items() if isinstance(value, float) and not math.isfinite(value)]
    for key in bad:
        data.setdefault("problems", ())
        data["problems"] = (*data["problems"], f"{key} is {data[key]}")
        data[key] = None
    kind = next(name for name, cls in _KINDS.items() if type(record) is cls)
    return json.dumps({"kind": kind, **data}, allow_nan=False, separators=(",", ":"))


def from_json(line: str) -> RunHeader | IterationRecord | RunEnd:
    """The record of one JSON line. Unknown keys of a newer minor version are ignored.

    Raises:
        ValueError: the line is not JSON, not a record, or of another schema version.
    """
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("kind") not in _KINDS:
        raise ValueError("not a dcpbench record")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"record schema version {data.get('schema_version')}; this dcpbench reads {SCHEMA_VERSION}")
    return _build(_KINDS[data["kind"]], data)


def _build(
    cls: type[RunHeader] | type[IterationRecord] | type[RunEnd], data: Mapping[str, Any]
) -> RunHeader | IterationRecord | RunEnd:
    known = {f.name for f in fields(cls)}
    values = {key: value for key, value in data.items() if key in known}
    for key in ("cp_sizes", "rank_seconds", "problems"):
        if isinstance(values.get(key), list):
            values[key] = tuple(values[key])
    if isinstance(values.get("cp_sizes"), dict):
        values["cp_sizes"] = {int(size): count for size, count in values["cp_sizes"].items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"incomplete record: {error}") from None


def read(path: Path) -> LaunchRecords:
    """Everything in a `records.jsonl`; a torn or foreign line lands in `malformed`, it does not stop the reading."""
    header: RunHeader | None = None
    iterations: list[IterationRecord] = []
    end: RunEnd | None = None
    malformed: list[str] = []
    for number, line in _lines(path):
        try:
            record = from_json(line)
        except ValueError as error:
            malformed.append(f"line {number}: {error}")
            continue
        if isinstance(record, RunHeader):
            if header is not None:
                malformed.append(f"line {number}: second header; the file holds more than one launch")
            header = record
        elif isinstance(record, IterationRecord):
            iterations.append(record)
        else:
            end = record
    return LaunchRecords(header, tuple(iterations), end, tuple(malformed))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def console_header(header: RunHeader) -> str:
    """The launch header as a console line; `parse.native` reads it back."""
    return "dcpbench header " + to_json(header)


def console_line(record: IterationRecord, iterations: int) -> str:
    """One line that a person can read and `parse.native` reads back.

    Fields are ` | `-separated `name value` pairs after `dcpbench iteration I/N`. The loss has nine
    significant digits: enough for a comparison at 1e-8 relative.
    """
    parts = [f"dcpbench iteration {record.iteration}/{iterations}"]

    def add(name: str, value: object, form: str = "") -> None:
        if value is not None:
            parts.append(f"{name} {value:{form}}")

    add("consumed samples", record.consumed_samples)
    add("consumed tokens", record.consumed_tokens)
    add("loss", record.loss if record.loss is not None else "nan", "" if record.loss is None else ".9g")
    add("grad norm", record.grad_norm, ".6g")
    add("lr", record.learning_rate, ".4e")
    add("time ms", None if record.seconds is None else 1e3 * record.seconds, ".3f")
    add("tokens", record.tokens)
    add("padding", record.padding_tokens)
    add("longest", record.longest)
    add("loss tokens", record.token_count)
    add("squared lengths", record.squared_lengths)
    add("microbatches", record.microbatches)
    if record.cp_sizes:
        add("cp", ",".join(f"{size}x{count}" for size, count in sorted(record.cp_sizes.items())))
    add("schedule ms", None if record.scheduling_seconds is None else 1e3 * record.scheduling_seconds, ".3f")
    add("memory MiB", None if record.peak_memory_bytes is None else record.peak_memory_bytes / 2**20, ".1f")
    add("TFLOP/s/GPU", record.tflops_per_gpu, ".2f")
    add("digest", record.batch_digest)
    return " | ".join(parts) + " |"
