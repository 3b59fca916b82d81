"""Where the token ids of a sample come from: a counting or Zipf recipe, or a prepared file.

Every source reads any stretch of any sample by itself: the ids depend on the sample's index (and
the seed), never on what was read before, by whom, or by how many ranks.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

END = 0
"""Id of the end mark of a generated sample; the recipes use it nowhere else."""


class TokenSource(Protocol):
    """Token ids by sample. `index` is the sample's place in the dataset; 0 <= start <= stop <= length, in tokens."""

    def read(self, index: int, length: int, start: int, stop: int) -> NDArray[np.int64]:
        """Ids of tokens [start, stop) of a sample of `length` tokens."""

    def trained(self, index: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Whether tokens [start, stop) may be trained on; None: all of them."""


class Counting:
    """1, 2, 3, ... and an end mark, as in Megatron-LM's mock; starts again at 1 when the vocabulary is used up."""

    def __init__(self, vocab_size: int) -> None:
        self._period = vocab_size - 1

    def read(self, index: int, length: int, start: int, stop: int) -> NDArray[np.int64]:
        """See `TokenSource`."""
        ids = np.arange(start, stop, dtype=np.int64) % self._period + 1
        return _with_end(ids, length, start, stop)

    def trained(self, index: int, start: int, stop: int) -> None:
        """Every token."""


class Zipf:
    """Independent ids with probability proportional to 1/id, and an end mark; every sample differs.

    A model learns the frequencies and stays there, so the loss neither collapses nor stands still.
    Token i of a sample is the i-th 64-bit output of Philox 4x64 (a counter-based generator, Salmon
    et al., SC 2011) under the key (seed, index), through the inverse distribution function.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._seed = seed
        weights = np.cumsum(1.0 / np.arange(1, vocab_size, dtype=np.float64))
        self._distribution = weights / weights[-1]

    def read(self, index: int, length: int, start: int, stop: int) -> NDArray[np.int64]:
        """See `TokenSource`."""
        # One counter step makes four outputs, so the stretch is reached without making what precedes it.
        block, skip = divmod(start, 4)
        generator = Philox(key=np.array([self._seed, index], np.uint64), counter=np.array([block, 0, 0, 0], np.uint64))
        raw = np.asarray(generator.random_raw(skip + stop - start), dtype=np.uint64)[skip:]
        uniform = (raw >> np.uint64(11)) * 2.0**-53
        ids = np.searchsorted(self._distribution, uniform, side="right").astype(np.int64) + 1
        return _with_end(ids, length, start, stop)

    def trained(self, index: int, start: int, stop: int) -> None:
        """Every token."""


class Stored:
    """Ids, and where needed the loss mask, of prepared text: one array of all tokens and the start of each sample.

    `ids`: (total tokens,) int32, usually memory-mapped; `offsets`: (samples + 1,) int64; `mask`:
    (total tokens,) bool, or None when every token is trained on.
    """

    def __init__(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], mask: NDArray[np.bool_] | None = None
    ) -> None:
        self._ids, self._offsets, self._mask = ids, offsets, mask

    def read(self, index: int, length: int, start: int, stop: int) -> NDArray[np.int64]:
        """See `TokenSource`; touches only the bytes asked for."""
        first = int(self._offsets[index])
        return self._ids[first + start : first + stop].astype(np.int64)

    def trained(self, index: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """See `TokenSource`."""
        if self._mask is None:
            return None
        first = int(self._offsets[index])
        return np.array(self._mask[first + start : first + stop], dtype=np.bool_)


def _with_end(ids: NDArray[np.int64], length: int, start: int, stop: int) -> NDArray[np.int64]:
    if start < stop == length:
        ids[-1] = END
    return ids
