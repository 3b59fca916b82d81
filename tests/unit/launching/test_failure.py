"""The first error of the rank that failed first, from logs as torchrun and the ranks write them."""

from pathlib import Path

import pytest

from dcpbench.launching.failure import Failure, ended, first_failure

SUMMARY = """\
W1130 15:28:06.195000 6188 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 11 closing signal
E1130 15:28:06.212000 6188 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) \
local_rank: {root} (pid: 6193) of binary: python
Traceback (most recent call last):
  File "run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
w.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_15:28:06
  host      : localhost
  rank      : {other} (local_rank: {other})
  exitcode  : {other_code} (pid: 6192)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 6192
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_15:28:06
  host      : localhost
  rank      : {root} (local_rank: {root})
  exitcode  : {code} (pid: 6193)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
ECHO = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/site/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank0]:     work.wait()
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20402.
"""


def summary(root: int, code: int, other: int = 0, other_code: int = -15) -> str:
    return SUMMARY.format(root=root, code=code, other=other, other_code=other_code)


def read(tmp_path: Path, text: str) -> Failure:
    log = tmp_path / "stdout.log"
    log.write_text(text, encoding="utf-8")
    return first_failure(log)


def test_assertion_of_the_first_rank(tmp_path: Path) -> None:
    text = "hello\n[rank1]: Traceback (most recent call last):\n"
    text += '[rank1]:   File "w.py", line 6, in <module>\n[rank1]: AssertionError: boom\n' + ECHO + summary(1, 1)
    failure = read(tmp_path, text)
    assert failure == Failure(1, 1, "AssertionError: boom", 4, 1)
    assert failure.sentence("x.log") == "rank 1 exited with code 1: AssertionError: boom (x.log:4)"


def test_the_root_cause_that_torchrun_guessed_wrong_is_corrected(tmp_path: Path) -> None:
    """Both ranks failed within one poll, so torchrun named rank 0, which only lost its peer."""
    text = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "w.py", line 6, in f\n[rank1]: KeyError: 3\n'
    failure = read(tmp_path, text + ECHO + summary(0, 1, other=1, other_code=1))
    assert (failure.rank, failure.error, failure.line) == (1, "KeyError: 3", 3)


def test_silent_exit_is_not_explained_by_its_echo(tmp_path: Path) -> None:
    failure = read(tmp_path, ECHO + summary(1, 7))
    assert failure.sentence("x.log") == "rank 1 exited with code 7"


def test_silent_exit_that_torchrun_blamed_on_the_other_rank(tmp_path: Path) -> None:
    failure = read(tmp_path, ECHO + summary(0, 1, other=1, other_code=7))
    assert (failure.rank, failure.exit_code, failure.error) == (1, 7, None)


def test_echo_is_shown_where_it_is_all_there_is(tmp_path: Path) -> None:
    """Rank 1 left with code 0; all that can be seen is what rank 0 says."""
    failure = read(tmp_path, ECHO + summary(0, 1))
    assert failure.error is not None
    assert "Connection closed by peer" in failure.error


def test_bare_assertion_gets_its_place(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "/a/b/model.py", line 12, in f\n    assert x\nAssertionError\n'
    assert read(tmp_path, text).error == "AssertionError in model.py line 12"


def test_worker_message_gives_its_traceback_a_rank(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad\n'
    text += "dcpbench worker: rank 1: ValueError: bad\n"
    failure = read(tmp_path, text + summary(0, 1, other=1, other_code=1))
    assert failure == Failure(1, 1, "ValueError: bad", 3, 1)


def test_worker_message_alone(tmp_path: Path) -> None:
    failure = read(tmp_path, "dcpbench worker: rank 1: sample 3 has 9000 tokens\n" + summary(1, 6))
    assert failure.sentence("l") == "rank 1 exited with code 6: sample 3 has 9000 tokens (l:1)"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "torch.OutOfMemoryError: CUDA",
        ),
        ("[rank0]: ModuleNotFoundError: No module named 'flash'", "ModuleNotFoundError: No module named 'flash'"),
        ("[rank0]: RuntimeError: gloo: Timed out waiting 5000ms for recv operation", "RuntimeError: gloo: Timed out"),
    ],
)
def test_usual_errors_in_a_traceback(tmp_path: Path, line: str, expected: str) -> None:
    failure = read(tmp_path, f"[rank0]: Traceback (most recent call last):\n[rank0]:   indented\n{line}\n")
    assert failure.error is not None
    assert failure.error.startswith(expected)
    assert failure.line == 3


@pytest.mark.parametrize(
    "line",
    [
        "[rank0]:[E1130 1:2:3.4 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: ...",
        "/venv/bin/python: No module named dcpbench.worker",
        "python: error while loading shared libraries: libcudart.so.13: cannot open shared object file",
        "Fatal Python error: Segmentation fault",
    ],
)
def test_errors_without_a_traceback(tmp_path: Path, line: str) -> None:
    failure = read(tmp_path, f"text\n{line}\n")
    assert failure.line == 2
    assert failure.error is not None


def test_translated_exception_shows_the_translation(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1\n\n'
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 2\nValueError: no such layer 1\n'
    )
    assert read(tmp_path, text).error == "ValueError: no such layer 1"


def test_exception_during_handling_does_not_hide_the_first(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 2\nOSError: cleanup\n'
    )
    assert read(tmp_path, text).error == "KeyError: 1"


def test_interleaved_tracebacks_are_kept_apart(tmp_path: Path) -> None:
    text = (
        "[rank1]: Traceback (most recent call last):\n[rank0]: Traceback (most recent call last):\n"
        '[rank1]:   File "a.py", line 1\n[rank0]:   File "b.py", line 2\n'
        "dcpbench iteration 3/20 | loss 1.0 |\n"
        "[rank0]: RuntimeError: Connection reset by peer\n[rank1]: ValueError: x\n"
    )
    assert read(tmp_path, text + summary(1, 1)).error == "ValueError: x"


def test_colours_carriage_returns_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(
        b"\xff\xfe\nTraceback (most recent call last):\n  x\n\x1b[31mtok 10%\r\x1b[0mValueError: bad\x1b[0m\r\n"
    )
    assert first_failure(log).error == "ValueError: bad"


def test_long_messages_are_cut_to_one_short_line(tmp_path: Path) -> None:
    failure = read(tmp_path, "Traceback (most recent call last):\nValueError: " + "x" * 9999 + "\n")
    assert failure.error is not None
    assert len(failure.error) == 300


def test_no_log_explains_nothing(tmp_path: Path) -> None:
    assert first_failure(tmp_path / "none.log") == Failure()
    assert Failure().sentence("x") == ""


def test_exit_status_in_words() -> None:
    assert ended(7) == "exited with code 7"
    assert ended(-11) == "was ended by SIGSEGV"
    assert "out of memory" in ended(-9)
    assert ended(-999) == "was ended by signal 999"
