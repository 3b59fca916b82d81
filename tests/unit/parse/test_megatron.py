import codecs
from pathlib import Path

import numpy as np
import pytest
from log_lines import averaged, megatron, megatron_log, write

from dcpbench.errors import LogError
from dcpbench.parse import parse_log
from dcpbench.table import LaunchTable

EXCERPT = Path(__file__).parents[2] / "data" / "megatron_excerpt.log"


def same(a: LaunchTable, b: LaunchTable, *, lines: bool = True) -> bool:
    names = [name for name in a.columns if lines or name != "line"]
    return all(np.array_equal(a.columns[n], b.columns[n], equal_nan=a.columns[n].dtype.kind == "f") for n in names)


def column(table: LaunchTable, name: str) -> list[float]:
    return table.columns[name].tolist()


def test_excerpt_with_all_that_surrounds_records() -> None:
    table = parse_log(EXCERPT)
    assert table.format == "megatron"
    assert table.malformed == ()
    assert not table.problems
    assert column(table, "iteration") == [1, 2, 3, 4]
    assert column(table, "total") == [4, 4, 4, 4]
    assert column(table, "consumed_samples") == [32, 64, 96, 128]
    assert column(table, "loss") == pytest.approx([12.20806, 11.13644, 10.77492, 10.01], rel=1e-6)
    assert column(table, "seconds") == pytest.approx([4.6551, 0.7191, 0.5272, 0.6], abs=1e-9)
    assert column(table, "samples") == [32, 32, 32, 32]
    assert column(table, "skipped") == [0, 0, 0, 0]


def test_a44_prefixes_added_by_the_launcher(tmp_path: Path) -> None:
    lines = [megatron(i, ms=1000.0 + i) for i in range(1, 7)]
    plain = parse_log(write(tmp_path / "plain.log", lines))
    for prefix in ("[default0]:", "[rank0]: ", "[default7]:[rank7]: ", "1: "):
        assert same(parse_log(write(tmp_path / "prefixed.log", [prefix + line for line in lines])), plain)
    assert plain.rows == 6


def test_a45_the_wrong_ranks_stream(tmp_path: Path) -> None:
    for rank in range(4):
        lines = [f"[Rank {rank}] (after 1 iterations) memory (MB) | allocated: 17.0 | reserved: 20.0"]
        lines += [megatron(i) for i in range(1, 7)] if rank == 3 else []
        write(tmp_path / "ranks" / str(rank) / "stdout.log", lines)
    assert parse_log(tmp_path / "ranks").rows == 6
    for choice in ("auto", "megatron"):
        alone = parse_log(tmp_path / "ranks" / "0" / "stdout.log", choice)
        assert alone.rows == 0
        assert "no records" in alone.hint
        assert "Megatron prints on the last rank" in alone.hint


def test_two_ranks_with_records_are_not_guessed_between(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"rank{rank}.log", [megatron(1)])
    with pytest.raises(LogError, match=r"rank0\.log, rank1\.log"):
        parse_log(tmp_path)


def test_a46_exponent_cut_off(tmp_path: Path) -> None:
    losses = ["6.050000E-06", "3.025E-06", "1.083941E+01", "9e0", "2.5", "1.08.3"]
    table = parse_log(write(tmp_path / "log.log", [megatron(i, loss=loss) for i, loss in enumerate(losses, 1)]))
    assert column(table, "loss") == pytest.approx([0.00000605, 0.0, 10.83941, 9.0, 2.5], abs=1e-12)
    (bad,) = table.malformed
    assert (bad.line, bad.iteration) == (6, 6)
    assert "1.08.3" in bad.message


@pytest.mark.parametrize("text", ["", "1,5", "1_0", "0x10", "1e", "--1", "1.0 2.0", "12ms"])
def test_malformed_numbers_of_any_kind(tmp_path: Path, text: str) -> None:
    table = parse_log(write(tmp_path / "log.log", [megatron(1), megatron(2), megatron(3, ms=text), megatron(4)]))
    assert column(table, "iteration") == [1, 2, 4]
    assert [(bad.line, bad.iteration) for bad in table.malformed] == [(3, 3)]


@pytest.mark.parametrize("count", ["1.5", "-3", "9" * 30, "nan"])
def test_counts_that_are_no_counts(tmp_path: Path, count: str) -> None:
    line = megatron(3).replace("global batch size:    32", f"global batch size: {count}")
    table = parse_log(write(tmp_path / "log.log", [megatron(1), megatron(2), line]))
    assert column(table, "iteration") == [1, 2]
    assert table.malformed[0].iteration == 3


def test_a47_nan_loss_has_no_field(tmp_path: Path) -> None:
    lines = [megatron(i, 10, loss=None if i == 6 else "2.5", norm="nan" if i == 6 else "1.0") for i in range(1, 11)]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert table.rows == 10
    assert np.isnan(table.columns["loss"][5])
    assert table.problems == {5: ("grad norm is nan",)}


@pytest.mark.parametrize("word", ["INF", "inf", "nan", "NaN", "-inf"])
def test_losses_that_are_not_finite(tmp_path: Path, word: str) -> None:
    table = parse_log(write(tmp_path / "log.log", [megatron(i, loss=word if i == 4 else "2.5") for i in range(1, 7)]))
    assert not np.isfinite(table.columns["loss"][3])
    assert table.problems == {3: (f"lm loss is {word.lower()}",)}
    assert table.malformed == ()


def test_a48_record_2_is_a_mean_of_two_iterations(tmp_path: Path) -> None:
    times = [8000.0, 1200.0, 1200.0, 1200.0, 1200.0, 1200.0]
    assert averaged(times) == [8000.0, 4600.0, 1200.0, 1200.0, 1200.0, 1200.0]
    losses = ["1.200000E+01", "1.150000E+01", "1.050000E+01", "1.0E+01", "9.5E+00", "9.0E+00"]
    table = parse_log(megatron_log(tmp_path / "log.log", times, losses))
    assert column(table, "seconds") == pytest.approx([8.0, 1.2, 1.2, 1.2, 1.2, 1.2])
    assert column(table, "loss")[:3] == [12.0, 11.0, 10.5]
    # 119.5 TFLOP/s over the mean of 4600 ms were really done in 1200 ms.
    assert table.columns["tflops_per_gpu"][1] == pytest.approx(119.5 * 4600 / 1200)


def test_the_averaging_is_undone_again_after_a_restart(tmp_path: Path) -> None:
    first = [megatron(i, 8, ms=ms) for i, ms in enumerate(averaged([8000.0, 1000.0, 1000.0, 1000.0]), 1)]
    again = [megatron(i, 8, ms=ms) for i, ms in enumerate(averaged([9000.0, 1100.0, 1100.0, 1100.0]), 5)]
    marker = ["[before the start of training step] datetime: 2026-06-09 14:02:58 "]
    table = parse_log(write(tmp_path / "log.log", marker + first + marker + again))
    assert column(table, "seconds") == pytest.approx([8.0, 1.0, 1.0, 1.0, 9.0, 1.1, 1.1, 1.1])


@pytest.mark.parametrize("after", range(7))
def test_a_marker_held_up_by_a_buffer_is_no_restart(tmp_path: Path, after: int) -> None:
    times = [8000.0, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0]
    losses = [f"{12 - n / 10:.6E}" for n in (0, 0.5, 2, 3, 4, 5)]
    lines = [
        megatron(i, 6, ms=ms, loss=loss) for i, (ms, loss) in enumerate(zip(averaged(times), losses, strict=True), 1)
    ]
    lines.insert(after, "[before the start of training step] datetime: 2026-06-09 14:02:58 ")
    table = parse_log(write(tmp_path / "log.log", lines))
    assert column(table, "seconds") == pytest.approx([ms / 1e3 for ms in times])
    assert column(table, "loss") == pytest.approx([12 - n / 10 for n in range(6)])


def test_a_log_that_lacks_its_beginning_still_shows_a_restart(tmp_path: Path) -> None:
    lines = [megatron(i, 8, ms=1000.0) for i in (2, 3, 4)]
    lines += ["[before the start of training step] datetime: 2026-06-09 15:00:00 "]
    lines += [megatron(i, 8, ms=ms) for i, ms in enumerate(averaged([9000.0, 1100.0, 1100.0, 1100.0]), 5)]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert column(table, "seconds")[3:] == pytest.approx([9.0, 1.1, 1.1, 1.1])


def test_a_log_that_cannot_have_been_averaged_is_left_alone(tmp_path: Path) -> None:
    lines = [megatron(1, 3, ms=8000.0), megatron(2, 3, ms=1000.0), megatron(3, 3, ms=1000.0)]
    assert column(parse_log(write(tmp_path / "log.log", lines)), "seconds") == [8.0, 1.0, 1.0]


def test_skip_counter_of_record_2_is_cumulative(tmp_path: Path) -> None:
    lines = [megatron(1, 3, skipped=1, loss=None), megatron(2, 3, skipped=1, loss="1.1E+01"), megatron(3, 3)]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert column(table, "skipped") == [1, 0, 0]
    # The mean is over the steps taken: iteration 2 alone.
    assert table.columns["loss"][1] == 11.0


def test_skipped_step(tmp_path: Path) -> None:
    lines = [megatron(i) for i in (1, 2, 3)] + [megatron(4, loss="0.000000E+00", norm="nan", skipped=1, nan=1)]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert column(table, "skipped") == [0, 0, 0, 1]


def test_a49_two_runs_in_one_file_are_both_read(tmp_path: Path) -> None:
    lines = [megatron(i) for i in (1, 2, 3)] + [megatron(i) for i in range(1, 7)]
    assert column(parse_log(write(tmp_path / "log.log", lines)), "iteration") == [1, 2, 3, 1, 2, 3, 4, 5, 6]


def test_a51_text_glued_before_and_after(tmp_path: Path) -> None:
    lines = [
        "saving state ..." + megatron(1, 5),
        megatron(2, 5) + "Number of parameters in billions:  0.60" + megatron(3, 5) + megatron(4, 5),
        megatron(5, 5) + "[after training is done] datetime: 2026-06-09 14:03:27 ",
    ]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert column(table, "iteration") == [1, 2, 3, 4, 5]
    assert column(table, "line") == [1, 2, 2, 2, 3]
    assert table.malformed == ()


@pytest.mark.parametrize("at", range(40, 300, 13))
def test_a51_a_record_interrupted_by_another_line(tmp_path: Path, at: int) -> None:
    """Cut at any place after its start, the record is malformed at its line, and its rest is no second fault."""
    torn = megatron(2, 5)
    lines = [megatron(1, 5), torn[:at] + "W0609 NCCL warns", torn[at:], megatron(3, 5)]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert column(table, "iteration") == [1, 3]
    assert len(table.malformed) == 1
    assert table.malformed[0].line in (2, 3)


def test_interrupted_within_one_line(tmp_path: Path) -> None:
    torn = megatron(2, 5).replace("elapsed time per", "elapsed time [rank1]: hello per")
    table = parse_log(write(tmp_path / "log.log", [megatron(1, 5), torn, megatron(3, 5)]))
    assert column(table, "iteration") == [1, 3]
    assert [(bad.line, bad.iteration) for bad in table.malformed] == [(2, 2)]


def test_a_record_that_starts_inside_another(tmp_path: Path) -> None:
    line = megatron(1, 5)[:120] + megatron(2, 5)
    table = parse_log(write(tmp_path / "log.log", [line, megatron(3, 5)]))
    assert column(table, "iteration") == [2, 3]
    assert [(bad.line, bad.iteration) for bad in table.malformed] == [(1, 1)]


def test_a52_carriage_returns_and_colour_codes(tmp_path: Path) -> None:
    coloured = megatron(1, 3).replace("lm loss", "\x1b[1;32mlm loss\x1b[0m")
    text = "tok 10%\rtok 60%\r" + coloured + "\n" + megatron(2, 3) + "\r\n\x1b]0;title\x07" + megatron(3, 3) + "\r"
    path = tmp_path / "log.log"
    path.write_bytes(text.encode())
    table = parse_log(path)
    assert column(table, "iteration") == [1, 2, 3]
    assert column(table, "line") == [1, 2, 3]
    assert table.malformed == ()


def test_line_ends_do_not_matter(tmp_path: Path) -> None:
    lines = [megatron(i) for i in range(1, 7)]
    plain = parse_log(write(tmp_path / "lf.log", lines))
    assert same(parse_log(write(tmp_path / "crlf.log", lines, end="\r\n")), plain)
    assert same(parse_log(write(tmp_path / "cr.log", lines, end="\r")), plain, lines=False)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "log.log"
    path.write_bytes(b"\x92 caf\xe9 \x00\n" + megatron(1).encode() + b"\x92\n")
    assert column(parse_log(path), "iteration") == [1]
    utf16 = tmp_path / "powershell.log"
    utf16.write_bytes(codecs.BOM_UTF16_LE + (megatron(1) + "\r\n" + megatron(2)).encode("utf-16-le"))
    assert column(parse_log(utf16), "iteration") == [1, 2]


def test_lines_that_are_no_records(tmp_path: Path) -> None:
    lines = [
        "[Rank 1] (after 1 iterations) memory (MB) | allocated: 5.0 | max allocated: 9.0 | reserved: 9.0",
        " validation loss at iteration 100 | lm loss value: 1.091236E+01 | lm loss PPL: 5.485014E+04 | ",
        "[Sequence Packing] Skipping automatic checkpoint at iteration 3 (microbatch change: 2 -> 32)",
        "iteration 3/40 |#####     | 12%",
        "Evaluating iter 1/1",
    ]
    table = parse_log(write(tmp_path / "log.log", lines + [megatron(1)]))
    assert column(table, "iteration") == [1]
    assert table.malformed == ()


def test_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    extra = " mtp_1 loss: 1.1E+01 | power per GPU (W/GPU): 600.1 | params norm: 431.2 | num zeros: 12 |"
    lines = [megatron(1, extra=extra), megatron(2), megatron(3, extra=extra), megatron(4)]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert column(table, "iteration") == [1, 2, 3, 4]
    assert table.malformed == ()


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot be read"):
        parse_log(tmp_path / "no.log")
    with pytest.raises(LogError, match="unknown log format 'wandb'"):
        parse_log(EXCERPT, "wandb")
    with pytest.raises(LogError, match="name the log itself"):
        parse_log(tmp_path)
