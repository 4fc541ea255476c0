"""python -m north_jax.main --config=configs/NAME.py --workdir=DIR [--config.path.to.key=value]"""

import os
import signal
import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration file, such as configs/demo.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder that everything the run produces lies in.")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "One of several processes of the run, each started with this command (docs/meshes.md)."
)


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def _parse(argv: list[str]) -> list[str]:
    """absl's flag parser, with one sentence for what a user can get wrong in a config flag."""
    path = next((arg.partition("=")[2] for arg in argv if arg.startswith("--config=")), None)
    if path is not None and not os.path.exists(path):
        _fail(f"there is no config file {path}; configs/ holds those there are")
    try:
        rest = flags.FLAGS(argv)
        _ = _CONFIG.value  # a config file is loaded when it is first asked for
        return rest
    except (AttributeError, KeyError) as error:
        _fail(f"--config has no setting {str(error.args[0]).strip(chr(34))}; {path} shows what there is")
    except (flags.Error, TypeError, ValueError) as error:
        _fail(f"{error}".replace("\n", " "))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        _fail(f"unexpected argument {argv[1]!r}; settings are given as --config.path.to.key=value")
    logging.set_verbosity(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever wants the machine back is told the same
    if _DISTRIBUTED.value:
        from north_jax.parallel import processes

        try:
            processes.join()
        except ValueError as error:
            _fail(str(error))
    from north_jax import jobs  # here, so that a mistyped flag answers before JAX is loaded

    try:
        jobs.run(_CONFIG.value, _WORKDIR.value)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except jobs.USER_ERRORS as error:
        _fail(str(error))


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=_parse)
