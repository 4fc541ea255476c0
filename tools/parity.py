"""Compares a checkpoint folder with recorded outputs of the reference implementation, or with another folder.

    python tools/parity.py FOLDER --oracle oracle.npz
    python tools/parity.py FOLDER --against OTHER [--text FILE]       # what a quantised folder lost

With a recording: the largest difference per quantity; exits with 1 when one is beyond its tolerance. Against a folder:
the drift of the log-probabilities on a text (by FOLDER's tokenizer) or on random tokens. Exits with 2 on bad input.
"""

import argparse
import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from north_jax.chat.tokenizer import Tokenizer
from north_jax.weights import CheckpointError, load
from north_jax.weights.parity import compare, drift


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="checkpoint folder")
    with_what = parser.add_mutually_exclusive_group(required=True)
    with_what.add_argument("--oracle", type=pathlib.Path, help="recorded arrays, an .npz file")
    with_what.add_argument("--against", type=pathlib.Path, help="another checkpoint folder")
    parser.add_argument("--text", type=pathlib.Path, help="with --against: the text to compare on")
    parser.add_argument("--tokens", type=int, default=256, help="with --against: tokens in a row, of 16 rows")
    parser.add_argument("--moe", choices=("dense", "grouped"), default="dense", help="how experts are computed")
    arguments = parser.parse_args(argv)
    try:
        # Float32 whatever the folder holds: in bfloat16 near-ties of the router flip, and a largest difference says
        # nothing.
        model = load(arguments.folder, dtype=jnp.float32, moe=arguments.moe)
        if arguments.against is not None:
            other = load(arguments.against, dtype=jnp.float32, moe=arguments.moe)
            for name, value in drift(model, other, _tokens(arguments, model.config.vocab_size)).items():
                print(f"{name:12s} {value:10.4g}")
            return 0
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


def _tokens(arguments: argparse.Namespace, vocab_size: int) -> np.ndarray:
    shape = (16, arguments.tokens)
    if arguments.text is None:
        return np.random.default_rng(0).integers(0, vocab_size, shape)
    ids = Tokenizer.load(arguments.folder).encode(arguments.text.read_text(encoding="utf-8"))
    rows = min(16, len(ids) // arguments.tokens)
    if not rows:
        raise ValueError(f"{arguments.text} has {len(ids)} tokens, fewer than --tokens={arguments.tokens}; take fewer")
    return np.array(ids[: rows * arguments.tokens]).reshape(rows, -1)


if __name__ == "__main__":
    sys.exit(main())
