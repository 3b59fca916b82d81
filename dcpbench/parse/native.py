"""dcpbench's own console lines (`records.console_*`), wherever they were captured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dcpbench import records
from dcpbench.parse.lines import Field, RecordReader, segments
from dcpbench.records import Malformed, RunEnd, RunHeader
from dcpbench.table import LaunchTable, TableBuilder

_START = r"dcpbench iteration (\d{1,18})/(\d{1,18}) \|"
_FIELDS = {
    "loss": Field("loss", "float"),
    "time ms": Field("seconds", "float"),
    "tokens": Field("tokens", "int"),
    "consumed samples": Field("consumed_samples", "int"),
    "consumed tokens": Field("consumed_tokens", "int"),
    "samples": Field("samples", "int"),
    "grad norm": Field("grad_norm", "float"),
    "lr": Field("learning_rate", "float"),
    "padding": Field("padding_tokens", "int"),
    "longest": Field("longest", "int"),
    "loss tokens": Field("token_count", "int"),
    "squared lengths": Field("squared_lengths", "int"),
    "microbatches": Field("microbatches", "int"),
    "cp": Field("cp_sizes", "text"),
    "schedule ms": Field("scheduling_seconds", "float"),
    "memory MiB": Field("peak_memory_bytes", "float"),
    "TFLOP/s/GPU": Field("tflops_per_gpu", "float", nonfinite=False),
    "digest": Field("batch_digest", "text"),
    "case": Field("case", "text"),
    "order": Field("order", "int"),
    "pass ms": Field("pass_seconds", "float"),
    "update ms": Field("update_seconds", "float"),
    "gradient difference": Field("gradient_difference", "float", nonfinite=False),
    "most in": Field("gradient_segment", "text"),
    "steps skipped": Field("skipped", "int"),
}
_MILLISECONDS = ("seconds", "scheduling_seconds", "pass_seconds", "update_seconds")
_DIVIDE = {**dict.fromkeys(_MILLISECONDS, 1e3), "peak_memory_bytes": 2.0**-20}
_HEADER = "dcpbench header "
_END = re.compile(r"dcpbench end \| (\d{1,18}) iterations in (\d+\.\d) s \|")
_ANY = re.compile(_START)


def recognises(text: str) -> bool:
    """Whether the text holds one of dcpbench's own console records, or the header of a launch."""
    return "dcpbench " in text and (_HEADER + "{" in text or _ANY.search(text) is not None)


def parse(path: Path) -> LaunchTable:
    """The records of a console log of the built-in worker.

    Raises:
        OSError: the file cannot be read.
    """
    reader = RecordReader(_START, _FIELDS, closing="steps skipped", literals=("dcpbench iteration", "steps skipped"))
    builder = TableBuilder(reader.names, _DIVIDE)
    headers: list[RunHeader] = []
    end: RunEnd | None = None
    for number, text in segments(path):
        for row, problems in reader.read(number, text):
            builder.add(row, problems)
        if _HEADER in text:
            found = _header(number, text)
            if isinstance(found, RunHeader) and not records.second_header(headers, found):
                headers.append(found)
            elif isinstance(found, Malformed):
                reader.malformed.append(found)
            else:
                reader.malformed.append(Malformed(number, "a second header; the log holds more than one launch"))
        if "dcpbench end" in text and (match := _END.search(text)):
            end = RunEnd(iterations=int(match[1]), seconds=float(match[2]))
    return LaunchTable(
        source=path.name,
        format="native",
        columns=builder.columns(),
        header=headers[0] if headers else None,
        headers=tuple(header for header in headers if header.mode == "lockstep"),
        end=end,
        malformed=tuple(reader.malformed),
        problems=builder.problems,
        # A log that was cut out of a larger one may lack both header and end; with the header, it is a whole launch.
        ends_are_marked=bool(headers),
        hint=f"no records in {path.name}; dcpbench prints them on rank 0",
    )


def _header(number: int, text: str) -> RunHeader | Malformed:
    """The header in a line, whatever is glued before or after its JSON."""
    start = text.index(_HEADER) + len(_HEADER)
    try:
        _, stop = json.JSONDecoder().raw_decode(text, start)
        record = records.from_json(text[start:stop])
    except (ValueError, RecursionError):
        return Malformed(number, "the launch header is torn")
    return record if isinstance(record, RunHeader) else Malformed(number, "the launch header is another record")
