"""`aligned.parquet`: one row per launch and iteration, warm-up marked, all launches of the run."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dcpbench.table import ABSENT, FLOATS, TEXTS

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis


def write(analysis: Analysis) -> bytes | None:
    """The Parquet file; None when the launches could not be aligned.

    Columns: `launch`, `case`, `pair`, `position`, `iteration`, `warmup`, then those of
    `table.LaunchTable` that any launch has (times in seconds, memory in bytes). Absent is null.
    """
    aligned = analysis.aligned
    if aligned is None:
        return None
    count, n = len(aligned.launches), aligned.iterations
    columns: dict[str, Any] = {}
    for name in ("launch", "case", "pair", "position"):
        words = [launch.id if name == "launch" else getattr(launch, name) for launch in aligned.launches]
        codes = pa.array(np.repeat(np.arange(count, dtype=np.int32), n))
        columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(words)).dictionary_decode()
    columns["iteration"] = np.tile(np.arange(1, n + 1), count)
    columns["warmup"] = columns["iteration"] <= analysis.warmup
    for name, values in aligned.columns.items():
        columns[name] = _column(name, values.ravel())
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression="zstd")
    return file.getvalue()


def _column(name: str, values: NDArray[Any]) -> Any:
    if name in TEXTS:
        # A word of full width everywhere (digests) is copied as one block.
        if (np.char.str_len(values) == values.dtype.itemsize).all():
            block = pa.py_buffer(np.ascontiguousarray(values))
            fixed = pa.Array.from_buffers(pa.binary(values.dtype.itemsize), len(values), [None, block])
            return fixed.cast(pa.binary()).cast(pa.string())
        return pa.array([word or None for word in values.tolist()], pa.binary()).cast(pa.string())
    missing = np.isnan(values) if name in FLOATS else values == ABSENT
    return pa.array(values, mask=missing)
