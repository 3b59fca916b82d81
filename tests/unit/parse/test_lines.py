import re
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_lines import megatron

from dcpbench.parse import megatron as module
from dcpbench.parse.lines import RecordReader, segments


def reader() -> RecordReader:
    return RecordReader(module._START, module._FIELDS, closing=module._CLOSING, literals=("iteration",))


WORDS = st.sampled_from(["1.0", "1E+01", "nan", "INF", "1e999", "-1", "12", "1.08.3", "", "7 7", "-", "+5", "1:2"])
LINES = st.lists(
    st.builds(
        lambda i, ms, loss, norm, cut, glue: (glue + megatron(i, 9, ms=ms, loss=loss, norm=norm))[cut:],
        i=st.integers(1, 9),
        ms=WORDS,
        loss=st.none() | WORDS,
        norm=st.none() | WORDS,
        cut=st.sampled_from([0, 0, 0, 40, 200, -30]),
        glue=st.sampled_from(["", "[rank0]: ", "saving iteration ", megatron(3, 9)[:99], megatron(4, 9)]),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(LINES)
def test_the_learned_layout_reads_what_the_general_way_reads(lines: list[str]) -> None:
    """The short cut (one expression for the layout of the last record) never changes a result."""
    quick, general = reader(), reader()
    for number, line in enumerate(lines, 1):
        general._layout = None
        assert repr(list(quick.read(number, line))) == repr(list(general.read(number, line)))
        general._layout = None
    assert quick.malformed == general.malformed


def test_the_short_cut_is_taken() -> None:
    own = reader()
    assert len(list(own.read(1, megatron(1, 9)))) == 1
    assert own._by_layout(2, megatron(2, 9), megatron(2, 9).index("iteration")) is not None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200), st.sampled_from([1, 3, 1 << 20]))
def test_segments_keep_every_byte_and_count_lines(tmp_path: Path, content: bytes, block: int) -> None:
    import dcpbench.parse.lines as lines

    content = re.sub(rb"\x1b|\xff\xfe|\xfe\xff", b"?", content)
    path = tmp_path / "log"
    path.write_bytes(content)
    before, lines._BLOCK = lines._BLOCK, block
    try:
        found = list(segments(path))
    finally:
        lines._BLOCK = before
    text = content.decode("latin-1")
    assert "".join(part for _, part in found) == text.replace("\r", "").replace("\n", "")
    expected = [(number, part) for number, line in enumerate(text.split("\n"), 1) for part in line.split("\r")]
    assert [pair for pair in found if pair[1]] == [pair for pair in expected if pair[1]]


def test_a_file_of_carriage_returns_only_is_given_out_in_parts(tmp_path: Path) -> None:
    import dcpbench.parse.lines as lines

    path = tmp_path / "log"
    path.write_bytes(b"tok 10%\r" * 1000 + b"end\nnext")
    before = lines._BLOCK, lines._LONGEST_SEGMENT
    lines._BLOCK, lines._LONGEST_SEGMENT = 64, 256
    try:
        found = list(segments(path))
    finally:
        lines._BLOCK, lines._LONGEST_SEGMENT = before
    assert [text for _, text in found if text] == ["tok 10%"] * 1000 + ["end", "next"]
    assert [number for number, text in found if text] == [1] * 1001 + [2]
