"""Converts a checkpoint folder, on any machine with the disk for it; no accelerator, never more than a layer in memory.

    python tools/convert.py SOURCE TARGET --to=orbax               # parameters as the decoder holds them: quick starts
    python tools/convert.py SOURCE TARGET                          # an Orbax folder back to Hugging Face
    python tools/convert.py SOURCE TARGET --dtype=bfloat16 --shard_gb=5
    python tools/convert.py SOURCE TARGET --quantise=fp8           # or fp8_block, int4: compressed-tensors layout
    python tools/convert.py SOURCE TARGET --dry_run                # only the plan: tensors, bytes, disk, memory

A conversion that was interrupted is continued by the same command; a folder that is there is never overwritten.
Exits with 2 on bad input, 130 when interrupted.
"""

import argparse
import sys

from north_jax.weights import quantize
from north_jax.weights.convert import convert
from north_jax.weights.export import SHARD_BYTES


def main(argv: list[str] | None = None) -> int:
    """Runs the conversion and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a Hugging Face or an Orbax folder")
    parser.add_argument("target", help="the folder to write")
    parser.add_argument("--to", choices=("hf", "orbax"), default="hf")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), help="cast all tensors")
    parser.add_argument("--quantise", choices=sorted(quantize.SCHEMES), help="the projections only")
    parser.add_argument("--shard_gb", type=float, default=SHARD_BYTES / 1e9, help="largest shard, in 10^9 bytes")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and stop")
    arguments = parser.parse_args(argv)
    try:
        convert(
            arguments.source,
            arguments.target,
            to=arguments.to,
            dtype=arguments.dtype,
            scheme=arguments.quantise,
            max_shard_bytes=int(arguments.shard_gb * 1e9),
            dry_run=arguments.dry_run,
        )
    except (OSError, ValueError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
