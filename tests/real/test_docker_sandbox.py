"""The battery of the bubblewrap sandbox against containers of a real Docker Engine, started for this file alone."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
from sandbox_battery import LIMITS, SandboxBattery, wait_until

from north_jax.envs import Sandbox, SandboxDied, SandboxUnavailable, make_sandbox

if shutil.which("dockerd") is None:
    pytest.skip("dockerd is not installed: apt-get install docker.io", allow_module_level=True)
if os.geteuid() != 0:
    pytest.skip("starting a Docker Engine needs root", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def engine():
    """An engine with its own data and socket that leaves the machine's network as it is; stopped at the end."""
    directory = Path(tempfile.mkdtemp(prefix="north-dockerd-"))
    options = ["--data-root", directory / "data", "--exec-root", directory / "exec", "--pidfile", directory / "pid"]
    options += ["-H", f"unix://{directory}/d.sock", "--log-level", "warn", "--ip-forward=false", "--bridge=none"]
    options += ["--iptables=false", "--ip6tables=false", "--exec-opt", "native.cgroupdriver=cgroupfs"]
    log = directory / "log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(["dockerd", *map(str, options)], stdout=output, stderr=output)
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = f"unix://{directory}/d.sock"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                make_sandbox("docker")  # builds the image, too
                break
            except SandboxUnavailable as error:
                if "answers" not in str(error):
                    raise
                if daemon.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"dockerd does not run on this machine: {log.read_text()[-500:]}")
                time.sleep(0.1)
        yield
    finally:
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        subprocess.run(["umount", str(directory / "exec/netns/default")], capture_output=True)
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def client():
    import docker

    connection = docker.from_env()
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture
def make():
    return lambda limits=None: make_sandbox("docker", limits)


@pytest.fixture
def driver_pid():
    def pid_of(sandbox) -> int:
        with client() as connection:
            return connection.api.inspect_container(sandbox._container)["State"]["Pid"]

    return pid_of


@pytest.fixture(scope="module")
def shared(engine):
    with make_sandbox("docker", LIMITS) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared) -> Sandbox:
    shared.reset()
    return shared


class TestDocker(SandboxBattery):
    pass


def test_container_removed_from_outside(make):
    with make(LIMITS) as sandbox, client() as connection:
        assert sandbox.run("echo here").output == "here\n"
        connection.api.remove_container(sandbox._container, force=True)
        with pytest.raises(SandboxDied):
            sandbox.run("true")
    with make(LIMITS) as sandbox:
        assert sandbox.run("echo back").output == "back\n"


def test_container_goes_with_the_process_that_started_it():
    source = """
        from north_jax.envs import make_sandbox
        sandbox = make_sandbox("docker").start()
        print(sandbox._container, flush=True)
        sandbox.run("sleep 100", timeout_s=100)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True) as host:
        container = host.stdout.readline().strip()
        host.send_signal(signal.SIGKILL)
    with client() as connection:
        wait_until(lambda: container not in [c["Id"] for c in connection.api.containers(all=True)], seconds=30)


def test_no_container_is_left(make):
    with client() as connection:
        before = len(connection.api.containers(all=True))
        with make(LIMITS):
            assert len(connection.api.containers(all=True)) == before + 1
        wait_until(lambda: len(connection.api.containers(all=True)) == before)


def test_an_image_that_is_absent_or_has_no_python(engine):
    from north_jax.envs.docker_engine import DockerSandbox

    with pytest.raises(SandboxUnavailable, match="has no image nonesuch:1"):
        DockerSandbox(image="nonesuch:1").start()
    with client() as connection, tempfile.NamedTemporaryFile(suffix=".tar") as file:
        subprocess.run(["tar", "-cf", file.name, "-C", "/", "--no-recursion", "etc"], check=True)
        connection.api.import_image(file.name, repository="empty", tag="1")
    with pytest.raises(SandboxUnavailable, match="could not start the sandbox"):
        DockerSandbox(image="empty:1").start()


def test_no_engine_is_named(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/d.sock")
    with pytest.raises(SandboxUnavailable, match=r"no Docker Engine answers at unix:///nonexistent/d.sock: start"):
        make_sandbox("docker")
