"""Runs under torchrun: the real worker on each launch file named in argv, one after the other, in one process.

Each launch gets its own part of torchrun's store, as if it had a torchrun to itself.
"""

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from dcpbench.plan import Launch
from dcpbench.worker.__main__ import run


def run_each(files: Iterable[str]) -> None:
    """Runs the launches one after the other; what `files` does before it yields the next is done in between."""
    torch.set_num_threads(1)
    initialise = dist.init_process_group
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for number, file in enumerate(files):
        dist.init_process_group = functools.partial(
            initialise,
            store=dist.PrefixStore(f"launch {number}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        run(Launch.model_validate_json(Path(file).read_text()))
        dist.destroy_process_group()


if __name__ == "__main__":
    run_each(sys.argv[1:])
