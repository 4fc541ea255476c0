"""Where the recorded cases of the reference are: the folder named by NORTH_ORACLE, by default the one in this tree."""

import os
import pathlib

import numpy as np

ROOT = pathlib.Path(os.environ.get("NORTH_ORACLE") or pathlib.Path(__file__).parent / "data" / "oracle")
SEEDS = sorted(path for path in ROOT.glob("seed*") if (path / "oracle.npz").exists())
if not SEEDS:
    raise FileNotFoundError(f"{ROOT} holds no seed*/oracle.npz; set NORTH_ORACLE to a folder that does")


def recording(seed: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of one case."""
    with np.load(seed / "oracle.npz") as file:
        return {name: file[name] for name in file.files}
