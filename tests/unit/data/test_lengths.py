from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dcpbench.data.lengths import TRAINING_SPLIT, csv_lengths, dataset_lengths, lognormal_draws
from dcpbench.errors import DataError
from dcpbench.spec import ListData, LognormalData, UniformData

MEGATRON = LognormalData(min_length=128, max_length=8192, mean=1024, sigma=1.5)


def test_lognormal_is_megatrons_mock() -> None:
    first = [4687, 605, 1443, 8192, 5474, 128, 1382, 264, 284, 615, 412, 2945, 1041, 399, 646, 548]
    assert dataset_lengths(MEGATRON)[:16].tolist() == first
    draws = lognormal_draws(MEGATRON)
    assert draws.size == 1_000_000
    assert draws.mean() == pytest.approx(906.7, abs=0.05)
    assert np.percentile(draws, [50, 90, 95, 99]).tolist() == [333, 2274, 3924, 8192]
    assert (draws == 128).mean() == pytest.approx(0.264, abs=5e-4)
    assert (draws == 8192).mean() == pytest.approx(0.016, abs=5e-4)
    assert (draws <= 2048).mean() == pytest.approx(0.887, abs=5e-4)
    long = draws > 4096
    assert (draws[long] ** 2).sum() / (draws**2).sum() == pytest.approx(0.695, abs=5e-4)


def test_lognormal_skewed_variant() -> None:
    draws = lognormal_draws(LognormalData(min_length=128, max_length=8192, mean=768, sigma=1.8))
    assert draws.mean() == pytest.approx(654, abs=0.5)
    assert np.percentile(draws, [50, 90]).tolist() == [152, 1527]


def test_lognormal_training_split_is_the_first_third() -> None:
    lengths = dataset_lengths(MEGATRON)
    assert lengths.size == TRAINING_SPLIT == 333_333
    assert lengths[-1] == lognormal_draws(MEGATRON)[333_332]


def test_lognormal_without_spread_is_constant() -> None:
    assert set(dataset_lengths(LognormalData(mean=100.9, sigma=0)).tolist()) == {100}


def test_seed_changes_lengths() -> None:
    other = MEGATRON.model_copy(update={"seed": 1})
    assert not np.array_equal(dataset_lengths(MEGATRON), dataset_lengths(other))


def test_uniform_covers_its_range_and_repeats() -> None:
    data = UniformData(min_length=5, max_length=8, seed=3)
    lengths = dataset_lengths(data)
    assert set(lengths.tolist()) == {5, 6, 7, 8}
    assert np.bincount(lengths)[5:].min() > 0.24 * lengths.size
    assert np.array_equal(lengths, dataset_lengths(data))


def test_uniform_draws_are_pinned() -> None:
    assert dataset_lengths(UniformData(min_length=16, max_length=1024))[:6].tolist() == [700, 575, 645, 208, 851, 779]


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (LognormalData, {"seed": 2**32}),
        (LognormalData, {"sigma": 1e200}),
        (UniformData, {"max_length": 2**31}),
        (ListData, {"lengths": (2**31,)}),
        (ListData, {"lengths": (1,)}),
    ],
)
def test_values_that_no_length_can_have_are_refused_by_the_spec(cls: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls(**values)


def test_list_in_order() -> None:
    assert dataset_lengths(ListData(lengths=(9, 3, 7))).tolist() == [9, 3, 7]


@pytest.mark.parametrize(
    ("content", "lengths"),
    [
        (b"512\n128\n", [512, 128]),
        (b"length\n512\n128\n", [512, 128]),
        (b"\xef\xbb\xbf512\r\n\r\n\r\n128", [512, 128]),
        (b"\xef\xbb\xbflength\r512\r128\r", [512, 128]),
        (b"a,b\n1024, 3\n5,7\n", [1024, 3, 5, 7]),
        (b"9,8\n7,6\n", [9, 8, 7, 6]),
        (b'"512"\n128.0\n1.28e2\n', [512, 128, 128]),
    ],
)
def test_csv_forms(tmp_path: Path, content: bytes, lengths: list[int]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_bytes(content)
    assert csv_lengths(path).tolist() == lengths


def test_csv_column(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("id,length\n0,512\n1,128\n")
    assert csv_lengths(path, "length").tolist() == [512, 128]


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (b"", None, "is empty"),
        (b"\n\n", None, "holds no length"),
        (b"length\n", None, "only a header"),
        (b"512\n\nabc\n", None, "lengths.csv, line 3: 'abc' is not a length"),
        (b"512\n12.5\n", None, "line 2: '12.5'"),
        (b"512\nnan\n", None, "line 2: 'nan'"),
        (b"nan\n512\n", None, "line 1: 'nan'"),
        (b"512\n1_000\n", None, "line 2: '1_000'"),
        (b"512,\n", None, "line 1: ''"),
        (b"512,abc\n", None, "line 1: 'abc'"),
        (b"length\n512\n1\n", None, "line 3: length 1 is outside"),
        (b"length\n512\n-4\n", None, "line 3: length -4 is outside"),
        (b"length\n99999999999\n", None, "line 2: length 99999999999 is outside"),
        (b"id,length\n0,512\n", None, "line 2: length 0 is outside .* choose one column"),
        (b"id,length\n0,512\n", "len", "line 1: no column 'len'; the columns are id, length"),
        (b"512\n128\n", "length", "line 1: no header"),
        (b"id,length\n0,512\n1\n", "length", "line 3: no cell in column 'length'"),
        (b"512\n\x92\n", None, "line 2: not UTF-8"),
        (b'512\n"128\n', None, "line 2: not CSV"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            None,
            "Git LFS pointer; fetch the object",
        ),
    ],
)
def test_csv_refusals_name_line_and_cell(tmp_path: Path, content: bytes, column: str | None, message: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        csv_lengths(path, column)


def test_csv_missing_or_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv does not exist"):
        csv_lengths(tmp_path / "none.csv")
    with pytest.raises(DataError, match="is a directory"):
        csv_lengths(tmp_path)


@given(rows=st.lists(st.lists(st.integers(2, 10**6), min_size=1, max_size=4), min_size=1), header=st.booleans())
def test_csv_keeps_every_number(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], header: bool) -> None:
    path = tmp_path_factory.mktemp("csv") / "lengths.csv"
    lines = ["a,b,c,d"] * header + [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(lines))
    assert csv_lengths(path).tolist() == [n for row in rows for n in row]
