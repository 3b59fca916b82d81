"""Rows of a text file as token samples, under the length policy of the spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from dcpbench.data.rows import open_rows
from dcpbench.data.text import Document, choose_columns, parse_row
from dcpbench.data.tokenizer import Encoded, Tokenizer
from dcpbench.errors import DataError
from dcpbench.spec import Spec, TextData

Progress = Callable[[int, int], None]
"""Called with the samples tokenised so far and the most that are needed."""


class TextSamples:
    """The encoded samples that a run's window needs, in file order, and what became of the others.

    `rows` counts the records of the file, `kept` the samples given out, `dropped` and `cut` those
    that the length policy touched; `columns` are the ones the text was found in.
    """

    def __init__(self, spec: Spec, data: TextData, tokenizer: Tokenizer, progress: Progress | None = None) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.columns: tuple[str, ...] = ()
        self.rows = self.kept = self.dropped = self.cut = 0
        self._vocab_size = spec.model.vocab_size
        self._needed = spec.training.iterations * spec.training.global_batch_size
        self._progress = progress

    def encode(self) -> Iterator[Encoded]:
        """The samples, one at a time; the counters are complete when it ends. To be walked once.

        Raises:
            DataError: a row, a token id or the whole file cannot be used; names its place.
        """
        file = open_rows(self.data.path)
        columns = choose_columns(self.data, file.names())
        if columns.form == "text" and self.data.loss_on == "response":
            raise DataError("data.loss_on: response needs messages, or a prompt and a response; plain text has neither")
        self.columns, self.rows = columns.names, file.count()
        for row in file.rows([*columns.names, *columns.contexts]):
            chat = parse_row(row, columns)
            try:
                if isinstance(chat, Document):
                    sample = self.tokenizer.encode_text(chat.text)
                else:
                    sample = self.tokenizer.encode_messages(chat.messages, self.data.loss_on)
            except ValueError as error:
                raise DataError(f"{row.place}: {error}") from None
            limited = self._limited(sample, row.place)
            if limited is None:
                continue
            self._check_ids(limited.ids, row.place)
            self.kept += 1
            yield limited
            if self._progress is not None:
                self._progress(self.kept, self._needed)
            if self.kept == self._needed:
                return
        if not self.kept:
            raise DataError(
                f"data.path: {self.data.path} has no usable sample: {self.dropped} of {self.rows} rows dropped"
            )

    def _limited(self, sample: Encoded, place: str) -> Encoded | None:
        """The sample under the length policy; None when it is dropped."""
        limit, length = self.data.max_length, int(sample.ids.size)
        if limit is None or length <= limit:
            return sample
        if self.data.too_long == "drop":
            self.dropped += 1
            return None
        if self.data.too_long == "cut":
            self.cut += 1
            return Encoded(sample.ids[:limit], None if sample.mask is None else sample.mask[:limit])
        raise DataError(
            f"{place}: {length} tokens, above data.max_length {limit}; raise it, or set data.too_long to drop or cut"
        )

    def _check_ids(self, ids: NDArray[np.int32], place: str) -> None:
        if ids.size < 2:
            raise DataError(f"{place}: {ids.size} tokens; a sample needs 2, because each token predicts the next")
        if int(ids.max()) >= self._vocab_size:
            raise DataError(
                f"model.vocab_size {self._vocab_size} is too small: {place} has token id {int(ids.max())}; "
                f"the tokenizer {self.tokenizer.identity.name} needs model.vocab_size {self.tokenizer.vocab_size}"
            )
