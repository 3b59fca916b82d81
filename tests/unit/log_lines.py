"""Logs and run folders as the tests of parsing and analysis need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dcpbench import plan, records
from dcpbench.records import IterationRecord, RunEnd, RunHeader
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder import ledger
from dcpbench.spec import Launches, Spec, Tolerances, Topology, Training

TIME = "[2026-06-09 14:03:21.118274]"


def megatron(
    iteration: int,
    total: int = 6,
    *,
    ms: float | str = 1000.0,
    loss: str | None = "1.083941E+01",
    norm: str | None = "1.250",
    batch: int = 32,
    consumed: int | None = None,
    skipped: int = 0,
    nan: int = 0,
    extra: str = "",
) -> str:
    """One of Megatron-LM's training records, without line end. `loss` None leaves the field out, as a NaN does."""
    parts = [
        f" {TIME} iteration {iteration:8d}/{total:8d} | consumed samples: {consumed or iteration * batch:12d} |",
        f" elapsed time per iteration (ms): {ms if isinstance(ms, str) else f'{ms:.1f}'} |",
        f" throughput per GPU (TFLOP/s/GPU): 119.5 | learning rate: 1.484703E-04 | global batch size: {batch:5d} |",
        "" if loss is None else f" lm loss: {loss} |",
        f"{extra} loss scale: 1.0 |",
        "" if norm is None else f" grad norm: {norm} |",
        f" number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |",
    ]
    return "".join(parts)


def averaged(times: Sequence[float]) -> list[float]:
    """Times as Megatron-LM logs them: the second is the mean of the first two."""
    return [times[0], (times[0] + times[1]) / 2, *times[2:]]


def megatron_log(path: Path, times: Sequence[float], losses: Sequence[str] | None = None, **fields: Any) -> Path:
    """A whole log with true iteration times `times` in ms."""
    total = len(times)
    shown = averaged(times) if total > 1 else list(times)
    chosen = losses or ["1.083941E+01"] * total
    lines = [
        megatron(i, total, ms=ms, loss=loss, **fields)
        for i, (ms, loss) in enumerate(zip(shown, chosen, strict=True), 1)
    ]
    return write(path, lines)


def write(path: Path, lines: Iterable[str], end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def header(case: str = "baseline", launch: str = "01-baseline", iterations: int = 6, **values: Any) -> RunHeader:
    defaults: dict[str, Any] = {
        "world_size": 4,
        "domain_size": 4,
        "cp": 4,
        "global_batch_size": 8,
        "warmup_iterations": 1,
        "flops_per_token": 1e9,
        "flops_per_squared_length": 1e3,
        "attention": "reference",
        "padding": "minimal",
        "scheduler": "dp_balanced" if case == "baseline" else "default_dynamic_cp",
    }
    return RunHeader(case=case, launch=launch, iterations=iterations, **{**defaults, **values})


def record(iteration: int, seconds: float = 1.0, **values: Any) -> IterationRecord:
    """A record of 8 samples and 1000 tokens."""
    defaults: dict[str, Any] = {
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 1000 * iteration,
        "samples": 8,
        "tokens": 1000,
        "padding_tokens": 50,
        "squared_lengths": 200_000,
        "longest": 300,
        "loss": 5.0 / iteration,
        "loss_sum": 4960.0 / iteration,
        "token_count": 992,
        "grad_norm": 1.5,
        "learning_rate": 1e-4,
        "rank_seconds": (seconds, seconds),
        "scheduling_seconds": 0.001,
        "microbatches": 2,
        "cp_sizes": {1: 2, 4: 1},
        "jobs": (0, 4, 400, 90_000, 0, 1, 300, 60_000, 1, 1, 350, 50_000),
        "ended": 1_780_000_000.0 + 10 * iteration,
        "batch_digest": f"{iteration:016x}",
        "peak_memory_bytes": 2**20,
    }
    return IterationRecord(iteration=iteration, seconds=seconds, **{**defaults, **values})


def jsonl(
    path: Path,
    rows: Iterable[IterationRecord],
    head: RunHeader | None = None,
    end: bool = True,
) -> Path:
    rows = list(rows)
    lines = [records.to_json(head)] if head else []
    lines += [records.to_json(row) for row in rows]
    if end:
        lines.append(records.to_json(RunEnd(iterations=len(rows), seconds=1.0)))
    return write(path, lines)


def spec(pairs: int = 1, iterations: int = 6, warmup: int = 1, **tolerances: Any) -> Spec:
    return Spec(
        name="example",
        topology=Topology(device="cpu", gpus_per_node=4, cp=4),
        training=Training(iterations=iterations, warmup_iterations=warmup, global_batch_size=8),
        launches=Launches(pairs=pairs),
        tolerances=Tolerances(**tolerances),
    )


def run_folder(
    folder: Path,
    seconds: dict[str, Sequence[float]],
    run_spec: Spec | None = None,
    statuses: dict[str, tuple[str, int | None, str | None]] | None = None,
    changes: dict[str, dict[int, dict[str, Any]]] | None = None,
) -> Path:
    """A run folder whose launches took `seconds[launch id]`; a launch without an entry never started.

    `changes` replaces fields of single records (launch -> iteration -> field -> value), `statuses`
    the end of a launch in the ledger (status, exit code, reason).
    """
    pairs = max(int(name[:2]) for name in seconds)
    run_spec = run_spec or spec(pairs, len(next(iter(seconds.values()))))
    launches = plan.build(run_spec, folder)
    runfolder.describe(runfolder.RunFolder(folder), run_spec, launches)
    for launch in launches:
        if launch.id not in seconds:
            continue
        ledger.append(folder / "ledger.jsonl", "start", launch.id)
        own = (changes or {}).get(launch.id, {})
        rows = [record(i, s, **own.get(i, {})) for i, s in enumerate(seconds[launch.id], 1)]
        whole = len(rows) == run_spec.training.iterations
        head = header(launch.case, launch.id, run_spec.training.iterations)
        jsonl(launch.records, rows, head, end=whole)
        write(launch.log, _console(rows, head, whole))
        launch.file.write_text(launch.model_dump_json())
        status, code, reason = (statuses or {}).get(launch.id, ("completed", 0, None))
        ledger.append(folder / "ledger.jsonl", "end", launch.id, status=status, exit_code=code, reason=reason)
    return folder


def _console(rows: list[IterationRecord], head: RunHeader, whole: bool) -> list[str]:
    lines = [records.console_header(head), *(records.console_line(row, head.iterations) for row in rows)]
    return [*lines, records.console_end(RunEnd(iterations=head.iterations, seconds=1.0))] if whole else lines
