"""Writes what starts a run on many machines, to be read before it is used; see docs/meshes.md.

    python tools/launch.py gke v5p:4x4x4 --image IMAGE --claim CLAIM -- --config=... --workdir=/runs/NAME > run.yaml
    python tools/launch.py slurm --nodes 4 --gpus 8 -- --config=... --workdir=... > run.sh
    python tools/launch.py ssh --hosts a b c --repository /home/me/north -- --config=... --workdir=... > run.sh

What follows `--` goes to `python -m north_jax.main` as it is; --workdir must lie on a disk that all machines share.
Nothing is started. Exits with 2 on bad input.
"""

import argparse
import math
import pathlib
import re
import shlex
import sys

import jinja2

TEMPLATES = pathlib.Path(__file__).with_name("launch")
# TPU -> GKE's name of it. Hosts of slices over several hosts have 4 chips.
ACCELERATORS = {"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}
CHIPS = 4


def render(template: str, **values) -> str:
    """The text of tools/launch/TEMPLATE with these values. Raises jinja2.UndefinedError for one that is missing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["shell_word"] = shlex.quote
    environment.filters["shell"] = lambda words: "".join(f" {shlex.quote(word)}" for word in words)
    # Not the one of jinja2, which escapes for HTML.
    environment.filters["tojson"] = lambda words: "[" + ", ".join(_yaml_string(word) for word in words) + "]"
    return environment.get_template(template).render(values)


def _yaml_string(word: str) -> str:
    return "'" + word.replace("'", "''") + "'"


def slice_hosts(topology: str) -> int:
    """Hosts of a slice such as 4x4x4. Raises ValueError unless they have four chips each."""
    if not re.fullmatch(r"\d+(x\d+){1,2}", topology):
        raise ValueError(f"{topology!r} is no topology; write it as 4x4 or 4x4x4")
    chips = math.prod(map(int, topology.split("x")))
    if chips == 0 or chips % CHIPS:
        raise ValueError(f"a slice of {topology} has {chips} chips, which are no hosts of {CHIPS}")
    return chips // CHIPS


def main(argv: list[str] | None = None) -> int:
    """Prints the rendered template and returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    own, arguments = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="north", help="of the run: lower-case letters, digits and dashes")
    where = parser.add_subparsers(dest="where", required=True)
    gke = where.add_parser("gke", help="a JobSet for one TPU slice")
    gke.add_argument("slice", help="TPU:TOPOLOGY, such as v5p:4x4x4")
    gke.add_argument("--image", required=True, help="a container image with north_jax[tpu]")
    gke.add_argument("--claim", required=True, help="a PersistentVolumeClaim that all pods may write")
    gke.add_argument("--mount", default="/runs", help="where the claim is seen")
    slurm = where.add_parser("slurm", help="a script for sbatch")
    slurm.add_argument("--nodes", type=int, required=True)
    slurm.add_argument("--gpus", type=int, required=True, help="a node")
    slurm.add_argument("--time", default="24:00:00", help="the job's limit")
    ssh = where.add_parser("ssh", help="a script that starts a process on every host")
    ssh.add_argument("--hosts", nargs="+", required=True, help="the first one must be reachable by all")
    ssh.add_argument("--repository", required=True, help="its folder on every host")
    ssh.add_argument("--port", type=int, default=8476, help="a free one on the first host")
    options = vars(parser.parse_args(own))
    try:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", options["name"]):
            raise ValueError(f"the name {options['name']!r} is not lower-case letters, digits and dashes")
        for flag in ("--config", "--workdir"):
            if not any(argument.startswith(f"{flag}=") for argument in arguments):
                raise ValueError(f"after -- there is no {flag}=…: what follows -- are the arguments of the run")
        match options.pop("where"):
            case "gke":
                kind, _, topology = options.pop("slice").partition(":")
                if kind not in ACCELERATORS:
                    raise ValueError(f"{kind!r} is no TPU known here; use one of {', '.join(ACCELERATORS)}")
                workdir = next(a for a in arguments if a.startswith("--workdir=")).partition("=")[2]
                if not pathlib.PurePosixPath(workdir).is_relative_to(options["mount"]):
                    raise ValueError(f"--workdir={workdir} is not below {options['mount']}, where the claim is mounted")
                slice_ = {"accelerator": ACCELERATORS[kind], "topology": topology, "hosts": slice_hosts(topology)}
                text = render("gke.yaml", **options, **slice_, chips=CHIPS, arguments=arguments)
            case "slurm":
                text = render("slurm.sh", **options, grace=300, arguments=arguments)
            case "ssh":
                text = render("ssh.sh", **options, arguments=arguments)
    except ValueError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
