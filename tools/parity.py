"""Compares a checkpoint folder with recorded outputs of the reference implementation.

    python tools/parity.py FOLDER --oracle oracle.npz

Prints the largest difference per quantity; exits with 1 when one is beyond its tolerance, with 2 on bad input.
"""

import argparse
import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from north_jax.weights import CheckpointError, load
from north_jax.weights.parity import compare


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="Hugging Face checkpoint folder")
    parser.add_argument("--oracle", type=pathlib.Path, required=True, help="recorded arrays, an .npz file")
    parser.add_argument("--moe", choices=("dense", "grouped"), default="dense", help="how experts are computed")
    arguments = parser.parse_args(argv)
    try:
        # Float32 whatever the folder holds: in bfloat16 near-ties of the router flip, and a largest difference says
        # nothing.
        model = load(arguments.folder, dtype=jnp.float32, moe=arguments.moe)
        with np.load(arguments.oracle) as file:
            recording = {name: file[name] for name in file.files}
        differences = []
        for difference in compare(model, recording):
            differences.append(difference)
            kind = "relative" if difference.relative else "absolute"
            verdict = "ok" if difference.ok else "BEYOND TOLERANCE"
            line = f"{difference.name:45s} {difference.value:10.3e} {kind}  of {difference.tolerance:.0e}  {verdict}"
            print(line, flush=True)
    except (CheckpointError, OSError, ValueError) as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    failed = [difference.name for difference in differences if not difference.ok]
    print(f"{len(differences)} quantities, {len(failed)} beyond tolerance{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
