"""tools/launch.py: what it writes is what GKE, Slurm and a shell take; only the scripts are run, with a false ssh."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from tools import launch

RUN = ["--config=configs/demo.py", "--workdir=/runs/it's mine", "--config.mesh.fsdp=16"]


def written(capsys, *arguments) -> str:
    assert launch.main([*arguments, "--", *RUN]) == 0
    return capsys.readouterr().out


def test_gke(capsys):
    job = yaml.safe_load(written(capsys, "gke", "v5p:4x4x4", "--image", "registry/north:1", "--claim", "disk"))
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["metadata"]["name"] == "north" and job["spec"]["failurePolicy"]["maxRestarts"] > 0
    (slice_,) = job["spec"]["replicatedJobs"]
    spec = slice_["template"]["spec"]
    assert (slice_["replicas"], spec["parallelism"], spec["completions"]) == (1, 16, 16)
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "north_jax.main", "--distributed"] and container["args"] == RUN
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"google.com/tpu": 4}
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert volume["name"] == mount["name"] and mount["mountPath"] == "/runs"
    assert volume["persistentVolumeClaim"] == {"claimName": "disk"}


def checked(script: str, path) -> str:
    path.write_text(script)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)
    return script


def false_command(folder, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1, 130])
def test_slurm(capsys, tmp_path, code):
    script = checked(written(capsys, "--name", "mine", "slurm", "--nodes", "4", "--gpus", "8"), tmp_path / "run.sh")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert asked["nodes"] == "4" and asked["ntasks-per-node"] == asked["gpus-per-node"] == "8"
    assert asked["signal"].startswith("TERM@") and "requeue" in asked and asked["job-name"] == "mine"
    # Options after the first command are not Slurm's any more.
    assert "#SBATCH" not in script.partition("\nsrun")[2]
    false_command(tmp_path, "srun", f'printf "%s\\n" "$@"; exit {code}')
    false_command(tmp_path, "scontrol", 'echo "scontrol $*"')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", tmp_path / "run.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == code
    lines = done.stdout.splitlines()
    assert lines[1:-1 if code == 130 else None] == [
        ".venv/bin/python", "-m", "north_jax.main", "--distributed", *RUN,
    ]  # fmt: skip
    assert (lines[-1] == "scontrol requeue 17") == (code == 130)


def ssh_script(capsys, tmp_path, remote: str):
    """A script for two hosts, a false ssh that runs on this one, and as python the script `remote`."""
    repository = tmp_path / "my repository"
    (repository / ".venv" / "bin").mkdir(parents=True)
    false_command(repository / ".venv" / "bin", "python", remote)
    name = f"t{os.getpid()}-{tmp_path.name[-8:].strip('_').replace('_', '-')}".lower()
    options = ["--name", name, "ssh", "--hosts", "me@one", "two", "--repository", str(repository), "--port", "99"]
    checked(written(capsys, *options), tmp_path / "run.sh")
    # Every host has its own /tmp.
    own = f'[ "$1" = -n ] || exit 9; mkdir -p {tmp_path}/$2; cd {tmp_path}/$2'
    false_command(tmp_path, "ssh", f'{own}; exec bash -c "${{3//\\/tmp\\/north_jax/$PWD/pid}}"')
    return subprocess.Popen(
        ["bash", tmp_path / "run.sh"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, cwd=tmp_path,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ssh_tells_every_host_who_it_is(capsys, tmp_path):
    told = 'printf "%s\\n" "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $(printf "<%s>" "$@")"'
    with ssh_script(capsys, tmp_path, f"{told}; exit $((3 * JAX_PROCESS_ID))") as process:
        said = sorted(process.communicate(timeout=60)[0].splitlines())
    arguments = "".join(f"<{word}>" for word in ["-m", "north_jax.main", "--distributed", *RUN])
    assert said == [f"one:99 2 0 {arguments}", f"one:99 2 1 {arguments}"]
    assert process.returncode == 3


def test_ssh_hands_a_signal_to_every_host(capsys, tmp_path):
    with ssh_script(capsys, tmp_path, 'trap "exit 130" TERM; echo up; while :; do sleep 0.1; done') as process:
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gke", "v9:4x4", "--image", "i", "--claim", "c", "--", *RUN], "'v9' is no TPU known here"),
        (["gke", "v5p:3x3x3", "--image", "i", "--claim", "c", "--", *RUN], "a slice of 3x3x3 has 27 chips"),
        (["gke", "v5p:many", "--image", "i", "--claim", "c", "--", *RUN], "'many' is no topology"),
        (
            ["gke", "v5p:4x4x4", "--image", "i", "--claim", "c", "--mount", "/d", "--", *RUN],
            "--workdir=/runs/it's mine is not below /d",
        ),
        (["slurm", "--nodes", "1", "--gpus", "1"], "after -- there is no --config"),
        (["--name", "A b", "slurm", "--nodes", "1", "--gpus", "1", "--", *RUN], "the name 'A b' is not"),
    ],
)
def test_one_sentence(capsys, arguments, sentence):
    assert launch.main(arguments) == 2
    said = capsys.readouterr()
    assert sentence in said.err and len(said.err.splitlines()) == 1 and not said.out


def test_it_runs_as_the_docs_say():
    command = [sys.executable, launch.__file__, "slurm", "--nodes", "1", "--gpus", "8", "--", *RUN]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shlex.join(RUN[1:2]) in out
