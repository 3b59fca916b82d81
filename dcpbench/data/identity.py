"""What the data of a run was, without saying where it lay: hashes, counts and the length histogram.

Nothing here holds a directory, so that a manifest can be shown to anyone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.errors import DataError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, kw_only=True)
class TokenizerIdentity:
    """Which tokenizer turned text into ids. `sha256` covers every file that can change an id or the chat template."""

    name: str
    sha256: str
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The samples of one run's window of `iterations` x `global_batch_size` draws.

    `samples` counts distinct samples and `draws` how often one was taken, repeats included; the
    token counts, the shortest, longest and mean length (in tokens) and the histogram are over the
    draws, so `total_tokens` is what one launch consumes. `length_histogram` maps the lower end of
    a bin [2^k, 2^(k+1)) to its draws. `rows` counts all records of the file (lengths, for CSV); those
    behind the last one that the window needs are counted, not read. `content_sha256` covers token ids and loss
    mask as used (text), or lengths and the recipe of the ids (generated samples): equal hashes,
    equal samples.
    """

    kind: str
    content_sha256: str
    samples: int
    draws: int
    total_tokens: int
    supervised_tokens: int
    shortest: int
    longest: int
    mean_length: float
    length_histogram: dict[int, int]
    file_name: str | None = None
    file_sha256: str | None = None
    rows: int | None = None
    columns: tuple[str, ...] = ()
    loss_on: str = "all"
    max_length: int | None = None
    too_long: str | None = None
    dropped: int = 0
    cut: int = 0
    unsupervised_samples: int = 0
    tokenizer: TokenizerIdentity | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        data = asdict(self)
        data["length_histogram"] = {str(low): count for low, count in self.length_histogram.items()}
        data["columns"] = list(self.columns)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataIdentity:
        """The identity of a `to_dict`, also after a trip through JSON. Unknown keys are ignored."""
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["length_histogram"] = {int(low): count for low, count in values["length_histogram"].items()}
        values["columns"] = tuple(values.get("columns", ()))
        if isinstance(values.get("tokenizer"), Mapping):
            values["tokenizer"] = TokenizerIdentity(**values["tokenizer"])
        return cls(**values)


def length_histogram(lengths: NDArray[np.int64], weights: NDArray[np.int64]) -> dict[int, int]:
    """Draws by power-of-two bin: lower end -> the sum of `weights` (draws of each sample) in the bin; no empty bins."""
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    return {1 << int(e): int(weights[exponents == e].sum()) for e in np.unique(exponents)}


def check_readable(path: Path, what: str) -> None:
    """Refuse a data file that is not there, is empty or is only a pointer to the real file.

    Raises:
        DataError: names the field `what` and the file as the user gave it, and what to do.
    """
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{what}: {path} is empty")
        check_lfs_pointer(path, what)
    except FileNotFoundError:
        raise DataError(f"{what}: {path} does not exist; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{what}: {path} is a directory; name one file") from None
    except OSError as error:
        raise DataError(f"{what}: {path} cannot be read: {error.strerror}") from None


def check_lfs_pointer(path: Path, what: str) -> None:
    """Refuse the small text file that a clone without Git LFS leaves where the data should be.

    Raises:
        DataError: it is one.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise DataError(f"{what}: {path}: this is a Git LFS pointer; fetch the object (git lfs pull)")


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def base_name(path: str | Path) -> str:
    """The last component of a path, also of `.` and of a path that ends in a slash."""
    return os.path.basename(os.path.abspath(path))
