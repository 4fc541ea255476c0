"""python -m north_jax.main --config=configs/NAME.py --workdir=DIR [--config.path.to.key=value]"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration file, such as configs/demo.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder that everything the run produces lies in.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; settings are given as --config.path.to.key=value")
    logging.use_python_logging(quiet=True)
    from north_jax import jobs  # here, so that a mistyped flag answers before JAX is loaded

    try:
        jobs.run(_CONFIG.value, _WORKDIR.value)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except jobs.USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
