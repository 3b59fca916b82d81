"""What is known of a Megatron-LM launch: event files, token counts, settings, and its log while it grows."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.analysis.sources import read_logs
from dcpbench.data.prepare import prepare
from dcpbench.launching.following import complete, follow
from dcpbench.megatron import events, recorded
from dcpbench.parse import megatron as log_format
from dcpbench.plan import Launch, build
from dcpbench.records import IterationRecord
from dcpbench.spec import Model, Spec

SPEC = Spec.model_validate(
    {
        "runner": "megatron_lm",
        "topology": {"device": "cuda", "gpus_per_node": 2, "cp": 2},
        "training": {"iterations": 4, "warmup_iterations": 2, "global_batch_size": 2},
        "data": {"kind": "list", "lengths": [10, 4, 7]},
        "megatron": {"checkout": "/m"},
    }
)


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, kind: int, content: bytes) -> bytes:
    return varint(number << 3 | kind) + (varint(len(content)) + content if kind == 2 else content)


def event(step: int, tag: str, value: float) -> bytes:
    """One record of an event file, as TensorBoard's writer lays it out (checksums left empty)."""
    summary = field(1, 2, tag.encode()) + field(2, 5, struct.pack("<f", value))
    message = field(1, 1, struct.pack("<d", 1e9)) + field(2, 0, varint(step)) + field(5, 2, field(1, 2, summary))
    return struct.pack("<Q", len(message)) + b"\0" * 4 + message + b"\0" * 4


def write_events(folder: Path, losses: dict[int, float]) -> Path:
    folder.mkdir(parents=True)
    path = folder / "events.out.tfevents.1"
    start = field(1, 1, struct.pack("<d", 1e9)) + field(3, 2, b"brain.Event:2")
    content = struct.pack("<Q", len(start)) + b"\0" * 4 + start + b"\0" * 4
    content += b"".join(
        event(step, "lm loss", loss) + event(step, "lm loss vs samples", -1) for step, loss in losses.items()
    )
    path.write_bytes(content)
    return path


def line(iteration: int, loss: float | None, milliseconds: float = 100.0, skipped: int = 0) -> str:
    words = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" [2026-06-09 14:03:0{iteration}.118274] iteration {iteration:8d}/       4 |"
        f" consumed samples: {2 * iteration:12d} | elapsed time per iteration (ms): {milliseconds:.1f} |"
        f" learning rate: 1.0E-04 | global batch size:     2 |{words} loss scale: 1.0 |"
        f" number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |\n"
    )


def log_of(losses: list[float | None]) -> str:
    first, second, *rest = losses
    assert first is not None
    mean = None if second is None else (first + second) / 2
    return "".join(line(n, loss) for n, loss in enumerate([first, mean, *rest], start=1))


def a_launch(folder: Path, text: str) -> Launch:
    launch = build(SPEC, folder)[0]
    launch.folder.mkdir(parents=True)
    launch.log.write_text(text)
    return launch


@given(st.dictionaries(st.integers(0, 2**40), st.floats(width=32, allow_nan=False), max_size=20))
def test_scalars_read_back(tmp_path_factory: pytest.TempPathFactory, losses: dict[int, float]) -> None:
    folder = tmp_path_factory.mktemp("events") / "tensorboard"
    write_events(folder, losses)
    assert events.scalars(folder, "lm loss") == losses


@given(cut=st.integers(0, 400), flip=st.integers(0, 399))
def test_a_damaged_event_file_is_no_error(tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int) -> None:
    path = write_events(tmp_path_factory.mktemp("events") / "tensorboard", {1: 2.5, 2: 3.5})
    content = bytearray(path.read_bytes())
    content[flip % len(content)] ^= 0xFF
    path.write_bytes(bytes(content[: len(content) - cut]))
    assert len(events.scalars(path.parent, "lm loss")) <= 2


def test_a_torn_end_leaves_what_came_before(tmp_path: Path) -> None:
    path = write_events(tmp_path / "t", {1: 2.5, 2: 3.5})
    path.write_bytes(path.read_bytes()[:-70])
    assert events.scalars(tmp_path / "t", "lm loss") == {1: 2.5}
    assert events.scalars(tmp_path / "nothing", "lm loss") == {}


def completed(launch: Launch) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], str | None]:
    table = log_format.parse(launch.log)
    table, remark = recorded.completed(table, SPEC, launch.case, launch.id, folder=launch.folder, data=launch.data)
    return table.columns["loss"], remark


def test_losses_of_event_files_are_exact(tmp_path: Path) -> None:
    """The second record is a mean, printed with seven digits: undone it is off in the last one."""
    exact = {n: float(np.float32(12.3456789 - n / 3)) for n in range(1, 5)}
    launch = a_launch(tmp_path, log_of(list(exact.values())))
    assert completed(launch)[0].tolist() == pytest.approx(list(exact.values()), abs=1e-4)
    write_events(launch.folder / "tensorboard", exact)
    losses, remark = completed(launch)
    assert losses.tolist() == list(exact.values())
    assert remark is None


def test_event_files_of_another_launch_are_not_taken(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, log_of([4.0, 3.0, 2.0, 1.0]))
    write_events(launch.folder / "tensorboard", {1: 4.0, 2: 3.0, 3: 2.1, 4: 1.0})
    losses, remark = completed(launch)
    assert losses.tolist() == pytest.approx([4.0, 3.0, 2.0, 1.0])
    assert remark is not None
    assert "01-baseline tell other losses" in remark


def test_a47_a_loss_that_the_log_lacks_stays_missing(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, log_of([4.0, 3.0, None, 1.0]))
    write_events(launch.folder / "tensorboard", {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0})
    losses, _ = completed(launch)
    assert np.isnan(losses[2])


def test_tokens_come_from_the_prepared_data(tmp_path: Path) -> None:
    launch = a_launch(tmp_path, log_of([4.0, 3.0, 2.0, 1.0]))
    prepare(SPEC, launch.data)
    table, _ = recorded.completed(
        log_format.parse(launch.log), SPEC, "baseline", launch.id, folder=launch.folder, data=launch.data
    )
    # 10 4 | 7 10 | 4 7 | 10 4, of each all but the last token
    assert table.columns["tokens"].tolist() == [12, 15, 9, 12]
    assert table.columns["squared_lengths"].tolist() == [90, 117, 45, 90]
    assert table.columns["longest"].tolist() == [9, 9, 6, 9]
    assert table.header is not None
    assert (table.header.case, table.header.iterations, table.header.dtype) == ("baseline", 4, "bfloat16")


def test_flops_are_those_of_the_built_in_worker() -> None:
    from dcpbench.worker.model import flops  # loads torch, for this comparison alone

    for model in (Model(), Model(flavour="classic"), Model(kv_heads=2, head_dim=32)):
        assert recorded.flops(model) == pytest.approx(flops(model))


def test_the_log_is_followed_while_it_grows(tmp_path: Path) -> None:
    whole = log_of([4.0, 3.0, 2.0, 1.0])
    launch = a_launch(tmp_path, "")
    follower = follow(launch)
    seen: list[IterationRecord] = []
    for start in range(0, len(whole), 97):  # at any place, also within a record
        with launch.log.open("a") as file:
            file.write(whole[start : start + 97])
        seen += [record for record in follower.read() if isinstance(record, IterationRecord)]
    assert [record.iteration for record in seen] == [1, 2, 3, 4]
    assert [record.loss for record in seen] == pytest.approx([4.0, 3.0, 2.0, 1.0])
    assert complete(launch) == (4, pytest.approx(0.4))


def test_a_log_that_ends_early_is_not_complete(tmp_path: Path) -> None:
    assert complete(a_launch(tmp_path, "".join(log_of([4.0, 3.0, 2.0, 1.0]).splitlines(True)[:3]))) is None


def test_the_order_of_launches_is_taken_from_their_logs(tmp_path: Path) -> None:
    text = log_of([4.0, 3.0, 2.0, 1.0])
    times = {"b1": "14:01", "d1": "14:02", "d2": "14:03", "b2": "14:04"}
    for name, time in times.items():
        (tmp_path / name).write_text(text.replace("14:03", time))
    logs = [tmp_path / name for name in ("b1", "b2", "d1", "d2")]
    source = read_logs(logs[:2], logs[2:], "megatron")
    assert [(launch.id, launch.position) for launch in source.launches] == [
        ("01-baseline", 1), ("01-dcp", 2), ("02-baseline", 4), ("02-dcp", 3),
    ]  # fmt: skip
    unknown = read_logs([logs[0]], [logs[0]], "megatron")
    assert [launch.position for launch in unknown.launches] == [None, None]
