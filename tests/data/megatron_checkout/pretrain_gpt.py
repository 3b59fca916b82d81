"""A stand-in for Megatron-LM's training script: checks its arguments, prints the log of a training that never was.

Records follow the documented format: on the last rank, the second one the mean of the first two.
`--standin-fault WHAT` or `CASE:WHAT` provokes a fault in iteration 3; see `FAULTS`.
"""

from __future__ import annotations

import os
import sys
import time

import gpt_builders  # noqa: F401 - the real script needs both on its path
import model_provider  # noqa: F401
from megatron.training.arguments import parse

FAULTS = ("oom", "assert", "nan", "skipped", "hang", "torn", "early", "twice", "gap", "samples", "noise", "drift")
AT = 3


def record(args, iteration, milliseconds, loss, *, skipped=0, samples=None):
    """One training record, without line end."""
    field = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" [2026-06-09 14:03:{iteration % 60:02d}.118274] iteration {iteration:8d}/{args.train_iters:8d} |"
        f" consumed samples: {samples or iteration * args.global_batch_size:12d} |"
        f" elapsed time per iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 119.5 |"
        f" learning rate: {args.lr:.6E} | global batch size: {args.global_batch_size:5d} |{field} loss scale: 1.0 |"
        f" grad norm: {'nan' if loss is None else '1.250'} | number of skipped iterations: {skipped:3d} |"
        " number of nan iterations:   0 |"
    )


def say(text, end="\n"):
    """To stdout, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def main() -> None:
    """Prints what a training would."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))
    last = rank == world_size - 1 or "RANK" not in os.environ
    args = parse(world_size)
    assert os.path.samefile(os.getcwd(), os.path.dirname(os.path.abspath(__file__))), "working directory"
    case = "dcp" if args.dynamic_context_parallel else "baseline"
    where, _, fault = (args.standin_fault or "").rpartition(":")
    fault = fault if where in ("", case) else ""
    assert fault in ("", *FAULTS), fault
    if rank == 0:
        say(f"using world size: {world_size}, context-parallel size: {args.context_parallel_size}")
        say("[before the start of training step] datetime: 2026-06-09 14:03:00 ")
    times = [1000.0, *([100.0 if case == "baseline" else 80.0] * (args.train_iters - 1))]
    losses = [12.0 - 0.01 * n + (1e-4 if case == "dcp" else 0.0) for n in range(args.train_iters)]
    if fault == "drift":
        losses = [loss + 0.5 for loss in losses]
    for iteration in range(1, args.train_iters + 1):
        # Beginning with the second record, sums start anew; the first one's are still in them.
        both = slice(0, 2) if iteration == 2 else slice(iteration - 1, iteration)
        milliseconds = sum(times[both]) / len(times[both])
        loss = sum(losses[both]) / len(losses[both])
        now = fault if iteration == AT else ""
        if now == "oom":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        assert now != "assert", "a sample does not fit"
        if now == "hang":
            time.sleep(600)
        if now == "early":
            return
        if not last:
            continue
        if now == "nan":
            say(record(args, iteration, milliseconds, None))
        elif now == "skipped":
            say(record(args, iteration, milliseconds, 0.0, skipped=1))
        elif now == "samples":
            say(record(args, iteration, milliseconds, loss, samples=iteration * args.global_batch_size + 1))
        elif now == "torn":
            whole = record(args, iteration, milliseconds, loss)
            say(whole[:150] + "WARNING: another rank writes\n" + whole[150:])
        elif now == "twice":
            say(record(args, iteration, milliseconds, loss))
            say(record(args, iteration, milliseconds, loss))
        elif now == "noise":
            sys.stdout.buffer.write(b"\xff\xfe[default1]:tok 10%\rtok 60%\r\x1b[32msaving state ...")
            say(record(args, iteration, milliseconds, loss).replace("lm loss", "\x1b[1mlm loss"))
        elif now != "gap":
            say(record(args, iteration, milliseconds, loss))
    if rank == 0:
        say("[after training is done] datetime: 2026-06-09 14:05:00 ")
    if last:
        say(f" validation loss at iteration {args.train_iters} on validation set | lm loss value: 1.1E+01 | ")


if __name__ == "__main__":
    main()
