import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
from sandbox_battery import LIMITS, SandboxBattery, wait_until

from north_jax.envs import SandboxDied, SandboxPool, SandboxUnavailable, cgroup, make_sandbox

if shutil.which("bwrap") is None:
    pytest.skip("bubblewrap is not installed: apt-get install bubblewrap", allow_module_level=True)


def monitor_pid(sandbox) -> int:
    return sandbox._process.pid


@pytest.fixture
def make():
    return lambda limits=None: make_sandbox("bubblewrap", limits)


@pytest.fixture
def driver_pid():
    def pid_of(sandbox) -> int:
        pid = monitor_pid(sandbox)
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    return pid_of


@pytest.fixture(scope="module")
def shared():
    with make_sandbox("bubblewrap", LIMITS) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared):
    """One start serves the whole battery, as it serves many episodes."""
    shared.reset()
    return shared


class TestBubblewrap(SandboxBattery):
    pass


def test_killed_bwrap_takes_everything_along_and_is_replaced(make, driver_pid):
    with SandboxPool(lambda: make(LIMITS), 2) as pool:
        sandbox = pool.acquire()
        driver = driver_pid(sandbox)
        timer = threading.Timer(0.2, os.kill, (monitor_pid(sandbox), signal.SIGKILL))
        timer.start()
        with pytest.raises(SandboxDied):
            sandbox.run("setsid sleep 30 & sleep 30", timeout_s=30)
        wait_until(lambda: not Path(f"/proc/{driver}").exists())
        pool.release(sandbox)
        with pool.lend() as fresh:
            assert fresh.run("echo back").output == "back\n"
        assert pool.starts == 2


def test_dies_with_the_process_that_started_it(tmp_path):
    source = """
        import sys, time
        from north_jax.envs import make_sandbox
        sandbox = make_sandbox("bubblewrap").start()
        pid = sandbox._process.pid
        children = open(f"/proc/{pid}/task/{pid}/children").read().split()
        print(pid, *children, *(sandbox._cgroup.directories if sandbox._cgroup else []), flush=True)
        sandbox.run("sleep 100", timeout_s=100)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True) as host:
        pids, groups = [], []
        for word in host.stdout.readline().split():
            (pids if word.isdigit() else groups).append(word)
        assert len(pids) == 2
        host.kill()
    for pid in pids:
        wait_until(lambda pid=pid: not Path("/proc", pid).exists())
    # The next sandbox removes the control group that the killed process could not.
    with make_sandbox("bubblewrap"):
        assert not any(Path(group).exists() for group in groups)


def test_outlives_the_thread_that_started_it():
    sandbox = make_sandbox("bubblewrap")
    thread = threading.Thread(target=sandbox.start)
    thread.start()
    thread.join()
    with sandbox:
        assert sandbox.run("echo here").output == "here\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop to another user and make control groups")
def test_root_is_dropped_and_limits_are_a_control_group(make, driver_pid):
    with make(LIMITS) as sandbox:
        status = Path(f"/proc/{driver_pid(sandbox)}/status").read_text()
        uid = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1]
        assert int(uid) == 60570
        group = sandbox._cgroup
        if group is None:
            pytest.skip("no writable control group hierarchy with memory, pids and cpu on this machine")
        directories = list(group.directories)
        for directory in directories:
            assert str(driver_pid(sandbox)) in (directory / "cgroup.procs").read_text().split()
    assert not any(directory.exists() for directory in directories)


def test_limits_hold_without_a_control_group(make, monkeypatch):
    monkeypatch.setattr(cgroup, "create", lambda *args: None)
    battery = SandboxBattery()
    with make(LIMITS) as sandbox:
        assert sandbox._cgroup is None
        battery.test_memory_limit(sandbox)
        assert sandbox.run("b() { b | b & }; b; sleep 100", timeout_s=1).exit_code != 0
        assert sandbox.run("set -- /proc/[0-9]*; echo $#").output == "2\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start it as another user")
def test_works_for_a_user_who_is_not_root():
    program = """
        import os
        from north_jax.envs import make_sandbox
        with make_sandbox("bubblewrap") as sandbox:
            print(os.getuid(), sandbox._cgroup, sandbox.run("id -u; ulimit -u; ulimit -v").output)
    """
    # With copied sources and the system's Python: another user may not be let into the place where ours lie.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        package = Path(directory, "north_jax")
        shutil.copytree(Path(cgroup.__file__).parent, package / "envs", ignore=shutil.ignore_patterns("__pycache__"))
        (package / "__init__.py").touch()
        python = next(path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.access(path, os.X_OK))
        user = ["setpriv", "--reuid=60571", "--regid=60571", "--clear-groups"]
        command = [*user, python, "-B", "-c", textwrap.dedent(program)]
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.split() == ["60571", "None", "1000", "128", str(512 << 10)]


def test_missing_bubblewrap_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed: run `apt-get install bubblewrap`"):
        make_sandbox("bubblewrap")


def test_missing_user_namespaces_are_named():
    # A user namespace of our own whose limit on further ones is 0: the machine's setting stays as it is.
    program = """
        from north_jax.envs import SandboxUnavailable, make_sandbox
        try:
            make_sandbox("bubblewrap").start()
        except SandboxUnavailable as error:
            print(error)
    """
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"]
    result = subprocess.run([*command, sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert result.stderr == ""
    assert "user namespaces are not available here" in result.stdout and result.stdout.count("\n") == 1


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="no sandbox of the kind 'chroot': use 'bubblewrap' or 'docker'"):
        make_sandbox("chroot")
