"""The lengths file with which Megatron-LM's mock data follow a spec whose lengths it cannot draw by itself."""

from __future__ import annotations

from pathlib import Path

from dcpbench.megatron.flags import LENGTHS_FILE, draws_its_own_lengths
from dcpbench.runfolder.layout import write_text
from dcpbench.spec import Spec, TextData


def write(spec: Spec, data: Path) -> None:
    """Write `LENGTHS_FILE` into the folder of prepared data, where the spec needs it.

    Megatron-LM takes the first line of the file for a header, and trains on the first third of the
    values: so there is a header, and all lengths stand there three times.
    """
    if isinstance(spec.data, TextData) or draws_its_own_lengths(spec):
        return
    import numpy as np  # noqa: PLC0415 - a dry run does without

    lengths = np.load(data / "lengths.npy", allow_pickle=False).tolist()
    write_text(data / LENGTHS_FILE, "length\n" + "".join(f"{length}\n" for length in lengths) * 3)
