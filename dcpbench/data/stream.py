"""The one sample stream: which samples each iteration holds, their lengths, tokens and labels.

Both cases, every rank and preflight read the same prepared folder. Position p of the stream (from
0) holds the dataset's sample p modulo its size; iteration t (from 1) holds positions (t-1)*GBS to
t*GBS-1. Neither depends on how the work is divided over ranks.

Prepared folder (written by `prepare.py`, all numbers little-endian):
    data.json        format, window, recipe of the ids, request and identity
    lengths.npy      (samples,) int64: tokens of each sample that the window touches
    supervised.npy   (samples,) int64: labels of each that count in the loss
    tokens.bin       text only: the ids of all samples, int32
    mask.bin         text only, where some tokens are not trained on: one byte a token, 1 = train
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dcpbench.data.tokens import Counting, Stored, TokenSource, Zipf
from dcpbench.errors import DataError

IGNORE_INDEX = -100
"""The label of a token that carries no loss."""
FORMAT = 1


class SampleStream:
    """A run's window of the sample stream. Immutable, so that a prefetching thread may share it.

    `lengths` and `supervised` are (samples,) int64, by place in the dataset, over the samples that
    the window of `iterations` x `global_batch_size` positions touches.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        supervised: NDArray[np.int64],
        source: TokenSource,
        *,
        global_batch_size: int,
        iterations: int,
    ) -> None:
        self.global_batch_size = global_batch_size
        self.iterations = iterations
        self._lengths, self._supervised, self._source = lengths, supervised, source

    @classmethod
    def open(cls, folder: Path) -> SampleStream:
        """The stream of a prepared folder.

        Raises:
            DataError: the folder is incomplete, damaged or of another format; names the file.
        """
        header = read_header(folder)
        try:
            lengths = np.load(folder / "lengths.npy", allow_pickle=False)
            supervised = np.load(folder / "supervised.npy", allow_pickle=False)
            source = _source(folder, header, lengths)
            window = {"global_batch_size": header["global_batch_size"], "iterations": header["iterations"]}
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"the prepared data in {folder} is damaged ({error}); delete that folder") from None
        if lengths.shape != supervised.shape or not lengths.size:
            raise DataError(f"the prepared data in {folder} is damaged (sample counts differ); delete that folder")
        return cls(lengths, supervised, source, **window)

    @property
    def samples(self) -> int:
        """Distinct samples in the window."""
        return int(self._lengths.size)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample in the window."""
        return int(self._lengths.max())

    def batch(self, iteration: int) -> NDArray[np.int64]:
        """(global_batch_size,) stream positions of an iteration, counted from 1.

        Raises:
            DataError: the iteration lies outside the prepared window.
        """
        if not 1 <= iteration <= self.iterations:
            raise DataError(f"iteration {iteration} is outside the prepared window of {self.iterations} iterations")
        first = (iteration - 1) * self.global_batch_size
        return np.arange(first, first + self.global_batch_size, dtype=np.int64)

    def sample_ids(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The dataset's sample at each stream position: its place among the usable samples, from 0."""
        # A window that wraps touches the whole dataset, one that does not never reaches the modulus.
        return np.asarray(positions, dtype=np.int64) % self._lengths.size

    def lengths(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Tokens of the sample at each position; padding is no part of it."""
        return self._lengths[self.sample_ids(positions)]

    def supervised(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Labels that count in the loss, of the sample at each position: at most its length - 1."""
        return self._supervised[self.sample_ids(positions)]

    def tokens(self, position: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Ids of tokens [start, stop) of one sample, cut at its end like a slice; reads only these.

        Raises:
            ValueError: `start` or `stop` is negative.
        """
        index, length, start, stop = self._bounds(position, start, stop)
        return self._source.read(index, length, start, stop)

    def labels(self, position: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """What tokens [start, stop) of one sample are to predict: labels[i] = tokens[i + 1] of the same sample.

        The label of the sample's last token, and of one whose successor the loss mask leaves out,
        is -100. Because the shift happens before any cut, a stretch of labels is the same whoever
        reads it.

        Raises:
            ValueError: `start` or `stop` is negative.
        """
        index, length, start, stop = self._bounds(position, start, stop)
        after = min(stop + 1, length)
        labels = np.full(stop - start, IGNORE_INDEX, dtype=np.int64)
        if after <= start + 1:
            return labels
        known = labels[: after - start - 1]
        known[:] = self._source.read(index, length, start + 1, after)
        trained = self._source.trained(index, start + 1, after)
        if trained is not None:
            known[~trained] = IGNORE_INDEX
        return labels

    def batch_digest(self, iteration: int) -> str:
        """Sixteen hexadecimal digits over the sample ids and lengths of an iteration, in order."""
        positions = self.batch(iteration)
        sha = hashlib.sha256(self.sample_ids(positions).astype("<i8").tobytes())
        sha.update(self.lengths(positions).astype("<i8").tobytes())
        return sha.hexdigest()[:16]

    def _bounds(self, position: int, start: int, stop: int | None) -> tuple[int, int, int, int]:
        index = int(position) % self._lengths.size
        length = int(self._lengths[index])
        if start < 0 or (stop is not None and stop < 0):
            raise ValueError(f"token range [{start}, {stop}) is negative")
        stop = length if stop is None else min(stop, length)
        return index, length, min(start, stop), stop


def read_header(folder: Path) -> dict[str, Any]:
    """`data.json` of a prepared folder.

    Raises:
        DataError: it is missing, not JSON or of another format.
    """
    path = folder / "data.json"
    try:
        header = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"no prepared data in {folder}: data.json: {error.strerror}") from None
    except ValueError:
        raise DataError(
            f"the prepared data in {folder} is damaged: data.json is not JSON; delete that folder"
        ) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"the prepared data in {folder} is of another format; delete that folder to prepare it anew")
    return header


def _source(folder: Path, header: dict[str, Any], lengths: NDArray[np.int64]) -> TokenSource:
    recipe = header["tokens"]
    if recipe["source"] == "counting":
        return Counting(recipe["vocab_size"])
    if recipe["source"] == "zipf":
        return Zipf(recipe["vocab_size"], recipe["seed"])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    total = int(offsets[-1])
    ids = np.memmap(folder / "tokens.bin", dtype="<i4", mode="r")
    mask = np.memmap(folder / "mask.bin", dtype=np.bool_, mode="r") if recipe["masked"] else None
    if ids.size != total or (mask is not None and mask.size != total):
        raise ValueError(f"tokens.bin and mask.bin should hold {total} tokens")
    return Stored(ids, offsets, mask)
