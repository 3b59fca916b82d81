"""Small files and specs for the tests of the data stage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcpbench.spec import Model, Spec, TextData, Training


@pytest.fixture
def make_spec() -> Callable[..., Spec]:
    def make(data: Any, iterations: int = 2, global_batch_size: int = 4, vocab_size: int = 512) -> Spec:
        return Spec(
            data=data,
            model=Model(vocab_size=vocab_size),
            training=Training(iterations=iterations, warmup_iterations=0, global_batch_size=global_batch_size),
        )

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes records (or ready lines of bytes) as JSON Lines."""

    def write(*records: Any, name: str = "rows.jsonl", head: bytes = b"") -> Path:
        lines = [r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in records]
        path = tmp_path / name
        path.write_bytes(head + b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture
def text_spec(make_spec: Callable[..., Spec]) -> Callable[..., Spec]:
    def make(path: Path, iterations: int = 1, global_batch_size: int = 2, vocab_size: int = 512, **data: Any) -> Spec:
        return make_spec(TextData(path=path, **data), iterations, global_batch_size, vocab_size)

    return make
