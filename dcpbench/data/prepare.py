"""Prepare a run's data once, before any rank starts: read, tokenise, check, and write one folder.

Ranks never wait for tokenising: they open what lies ready (`stream.py` describes the folder). The
folder appears whole or not at all, and is used again only for exactly the same request.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dcpbench.data.encode import Progress, TextSamples
from dcpbench.data.identity import DataIdentity, check_readable, file_sha256, length_histogram
from dcpbench.data.lengths import dataset_lengths
from dcpbench.data.stream import FORMAT, SampleStream, read_header
from dcpbench.data.tokenizer import Tokenizer, load_tokenizer
from dcpbench.errors import DataError
from dcpbench.spec import CsvData, Spec, TextData


def prepare(spec: Spec, folder: Path, progress: Progress | None = None) -> DataIdentity:
    """Write the prepared data of a spec to `folder`, or find it there, and say what it is.

    Raises:
        DataError: the data cannot be used (names file and line), a token id is outside
            `model.vocab_size`, an iteration has no token to train on, or `folder` holds something else.
    """
    data = spec.data
    tokenizer = load_tokenizer(data.tokenizer) if isinstance(data, TextData) else None
    request = _request(spec, tokenizer)
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        return _existing(folder, request)
    with _staging(folder) as staging:
        if isinstance(data, TextData):
            assert tokenizer is not None
            samples = TextSamples(spec, data, tokenizer, progress)
            lengths, supervised, details = _write_text(samples, staging)
            recipe: dict[str, Any] = {"source": "stored", "masked": data.loss_on == "response"}
            details["file_sha256"] = request["file_sha256"]
        else:
            dataset = dataset_lengths(data)
            lengths = dataset[: _window(spec)]
            supervised = lengths - 1
            recipe = {"source": data.tokens, "vocab_size": spec.model.vocab_size}
            if data.tokens == "zipf":
                recipe["seed"] = data.seed
            details = {"content_sha256": _mock_hash(recipe, lengths)}
            if isinstance(data, CsvData):
                details |= {"file_name": data.path.name, "file_sha256": request["file_sha256"], "rows": dataset.size}
        _check_supervision(spec, supervised)
        identity = _identity(spec, lengths, supervised, details)
        np.save(staging / "lengths.npy", lengths.astype("<i8"))
        np.save(staging / "supervised.npy", supervised.astype("<i8"))
        header = {
            "format": FORMAT,
            "iterations": spec.training.iterations,
            "global_batch_size": spec.training.global_batch_size,
            "tokens": recipe,
            "request": request,
            "identity": identity.to_dict(),
        }
        (staging / "data.json").write_text(json.dumps(header, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return identity


def longest(spec: Spec) -> int:
    """Tokens of the longest sample in a spec's window, without writing anything; tokenises where there is text.

    Raises:
        DataError: as `prepare`.
    """
    data = spec.data
    if not isinstance(data, TextData):
        return int(dataset_lengths(data)[: _window(spec)].max())
    samples = TextSamples(spec, data, load_tokenizer(data.tokenizer))
    return max((int(sample.ids.size) for sample in samples.encode()), default=0)


def _window(spec: Spec) -> int:
    """Draws of one launch."""
    return spec.training.iterations * spec.training.global_batch_size


def _mock_hash(recipe: dict[str, Any], lengths: NDArray[np.int64]) -> str:
    sha = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    sha.update(lengths.astype("<i8").tobytes())
    return sha.hexdigest()


def _request(spec: Spec, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """All that decides what is prepared, as JSON values; files by content, so that a move changes nothing."""
    data = spec.data
    request: dict[str, Any] = {
        "data": data.model_dump(mode="json", exclude={"path", "tokenizer"}),
        "iterations": spec.training.iterations,
        "global_batch_size": spec.training.global_batch_size,
        "vocab_size": spec.model.vocab_size,
    }
    if isinstance(data, TextData | CsvData):
        check_readable(data.path, "data.path")
        request["file_sha256"] = file_sha256(data.path)
    if tokenizer is not None:
        request["tokenizer_sha256"] = tokenizer.identity.sha256
    return request


def _existing(folder: Path, request: dict[str, Any]) -> DataIdentity:
    """The identity of a folder that was prepared for the same request."""
    header = read_header(folder)
    stored = header.get("request", {})
    if stored != request:
        changed = sorted(key for key in {*stored, *request} if stored.get(key) != request.get(key))
        raise DataError(
            f"{folder} holds data prepared for another request ({', '.join(changed)} differ); "
            "choose another run folder, or delete that one"
        )
    SampleStream.open(folder)  # refuses a folder that has lost a file
    return DataIdentity.from_dict(header["identity"])


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it when the block ends well, and is gone when it does not."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"prepared data cannot be written beside {folder}: {error.strerror}") from None
    try:
        yield staging
        staging.chmod(0o755)  # a temporary folder begins readable by its owner only
        staging.rename(folder)
    except OSError as error:
        raise DataError(f"data could not be prepared in {folder}: {error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_supervision(spec: Spec, supervised: NDArray[np.int64]) -> None:
    """Refuse an iteration whose loss would be a division by zero tokens."""
    if supervised.all():
        return
    size = spec.training.global_batch_size
    for iteration in range(1, spec.training.iterations + 1):
        ids = np.arange((iteration - 1) * size, iteration * size) % supervised.size
        if not supervised[ids].any():
            raise DataError(
                f"iteration {iteration} has no token to train on: none of its {size} samples (from sample {ids[0]} on) "
                "has a label that counts; raise training.global_batch_size, or change data.loss_on or data.max_length"
            )


def _identity(
    spec: Spec, lengths: NDArray[np.int64], supervised: NDArray[np.int64], details: dict[str, Any]
) -> DataIdentity:
    draws, samples = _window(spec), int(lengths.size)
    times = np.full(samples, draws // samples, dtype=np.int64)
    times[: draws % samples] += 1
    total = int((lengths * times).sum())
    return DataIdentity(
        kind=spec.data.kind,
        samples=samples,
        draws=draws,
        total_tokens=total,
        supervised_tokens=int((supervised * times).sum()),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        mean_length=total / draws,
        length_histogram=length_histogram(lengths, times),
        unsupervised_samples=int((supervised == 0).sum()),
        **details,
    )


def _write_text(samples: TextSamples, staging: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, Any]]:
    """Write ids and mask; return lengths and supervised counts, (samples,) each, and identity fields."""
    lengths: list[int] = []
    supervised: list[int] = []
    sha = hashlib.sha256()
    masked = samples.data.loss_on == "response"
    with (staging / "tokens.bin").open("wb") as ids_file, _optional(staging / "mask.bin", masked) as mask_file:
        for ids, mask in samples.encode():
            lengths.append(int(ids.size))
            supervised.append(int(ids.size) - 1 if mask is None else int(mask[1:].sum()))
            parts = [np.array([ids.size], "<i8").tobytes(), ids.astype("<i4").tobytes()]
            ids_file.write(parts[1])
            if mask_file is not None:
                assert mask is not None
                parts.append(mask.astype(np.bool_).tobytes())
                mask_file.write(parts[2])
            for part in parts:
                sha.update(part)
    if not samples.cut and all(length == 2 for length in lengths):
        raise DataError(
            f"data.path: every sample of {samples.data.path.name} has 2 tokens: the column or the tokenizer is wrong"
        )
    details = {
        "content_sha256": sha.hexdigest(),
        "file_name": samples.data.path.name,
        "rows": samples.rows,
        "columns": samples.columns,
        "loss_on": samples.data.loss_on,
        "max_length": samples.data.max_length,
        "too_long": samples.data.too_long,
        "dropped": samples.dropped,
        "cut": samples.cut,
        "tokenizer": samples.tokenizer.identity,
    }
    return np.array(lengths, np.int64), np.array(supervised, np.int64), details


@contextmanager
def _optional(path: Path, wanted: bool) -> Iterator[IO[bytes] | None]:
    if not wanted:
        yield None
        return
    with path.open("wb") as file:
        yield file
