"""The sandbox without a daemon: bubblewrap, started as an unprivileged user.

Own user, pid, network, mount, IPC, UTS and cgroup namespaces; the host's /usr read-only; everything writable in sized
tmpfs; no capability, no new privilege, a seccomp filter; memory, processes and CPU bounded by a control group where
this process may make one (root with a writable hierarchy), by rlimits otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from north_jax.envs import cgroup, seccomp
from north_jax.envs.sandbox import DRIVER_ARGUMENTS, ENV, VAULT, WORK, Limits, Sandbox, SandboxUnavailable, Wire

USER_ID = 60570  # whom root becomes before it starts bubblewrap: an id that Debian and systemd give to nobody
INSIDE_ID = 1000
_OWN_PROCESSES = 4  # bubblewrap's monitor and the driver count towards the group's limit
_ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nuser:x:{INSIDE_ID}:{INSIDE_ID}:user:{WORK}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nuser:x:{INSIDE_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
}
# `--die-with-parent` means the thread that started it, not the process; so one thread, which lasts, starts them all.
_starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox-starter")


def _new_starter() -> None:
    global _starter
    _starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox-starter")


os.register_at_fork(after_in_child=_new_starter)  # threads do not survive a fork


class BubblewrapSandbox(Sandbox):
    """Raises SandboxUnavailable when bubblewrap or a Python under /usr is missing or the architecture is unknown."""

    def __init__(self, limits: Limits | None = None):
        super().__init__(limits)
        self._bwrap = shutil.which("bwrap")
        if self._bwrap is None:
            raise SandboxUnavailable("bubblewrap is not installed: run `apt-get install bubblewrap`")
        self._python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if _is_usr(path)), None)
        if self._python is None:
            raise SandboxUnavailable("the sandbox needs a Python below /usr: run `apt-get install python3`")
        try:
            self._filter = seccomp.bpf()
        except NotImplementedError as error:
            raise SandboxUnavailable(str(error)) from error
        self._process: subprocess.Popen | None = None
        self._cgroup: cgroup.Cgroup | None = None
        self._stderr = None

    def _launch(self) -> Wire:
        limits = self.limits
        if os.geteuid() == 0:
            self._cgroup = cgroup.create(limits.memory_mib << 20, limits.pids + _OWN_PROCESSES, limits.cpus)
        self._stderr = os.fdopen(os.memfd_create("stderr"), "w+b", buffering=0)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            etc = {f"/etc/{name}": stack.enter_context(_memory_file(text.encode())) for name, text in _ETC.items()}
            filter_file = stack.enter_context(_memory_file(self._filter))
            arguments = self._arguments({path: file.fileno() for path, file in etc.items()}, filter_file.fileno())
            # By descriptor, so that the command line shown inside is not full of this machine's paths.
            joined = "\0".join(arguments).encode()
            argument_file = stack.enter_context(_memory_file(joined))
            command = [self._bwrap, "--args", str(argument_file.fileno()), "--", self._python, *DRIVER_ARGUMENTS]
            try:
                self._process = _starter.submit(
                    subprocess.Popen,
                    self._as_user(command),
                    stdin=theirs,
                    stdout=theirs,
                    stderr=self._stderr,
                    pass_fds=[file.fileno() for file in (*etc.values(), filter_file, argument_file)],
                    env={"PATH": ENV["PATH"] + ":/usr/sbin:/sbin"},
                    cwd="/",
                    start_new_session=True,  # Ctrl-C in the terminal is the host's affair
                ).result()
            except BaseException:
                ours.close()
                raise
        return Wire(ours)

    def _as_user(self, command: list[str]) -> list[str]:
        """The command, entered into the control group as root and then started as a user who is not."""
        if os.geteuid() != 0 or not _user_exists_here():
            return command
        groups = self._cgroup.procs_files if self._cgroup else []
        enter = "".join(f'echo $$ > "${index}" && ' for index in range(1, len(groups) + 1))
        drop = f"shift {len(groups)} && exec setpriv --reuid={USER_ID} --regid={USER_ID} --clear-groups -- "
        return ["/bin/sh", "-c", enter + drop + '"$@"', "sh", *groups, *command]

    def _arguments(self, etc: dict[str, int], filter_fd: int) -> list[str]:
        limits = self.limits

        def tmpfs(path: str, mib: int, mode: str = "0755") -> list[str]:
            return ["--perms", mode, "--size", str(mib << 20), "--tmpfs", path]

        arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
        arguments += ["--as-pid-1", "--cap-drop", "ALL", "--hostname", "box"]
        arguments += ["--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--clearenv", "--setenv", "PATH", ENV["PATH"]]
        arguments += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            host = Path("/", name)
            if host.is_symlink():
                arguments += ["--symlink", os.readlink(host), str(host)]
            elif host.is_dir():
                arguments += ["--ro-bind", str(host), str(host)]
        for path in ("/etc/ld.so.cache", "/etc/alternatives"):
            arguments += ["--ro-bind-try", path, path]
        for path, fd in etc.items():
            arguments += ["--perms", "0644", "--ro-bind-data", str(fd), path]
        arguments += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp", "--proc", "/proc", "--dev", "/dev"]
        arguments += [*tmpfs("/dev/shm", 32, "1777"), "--remount-ro", "/dev"]
        arguments += tmpfs(WORK, limits.box_mib) + tmpfs("/tmp", limits.tmp_mib, "1777") + tmpfs(VAULT, 32)
        return [*arguments, "--remount-ro", "/", "--chdir", WORK, "--seccomp", str(filter_fd)]

    def _rlimits(self) -> dict[str, int]:
        limits = super()._rlimits()
        if self._cgroup is None:
            limits |= {"NPROC": self.limits.pids, "AS": self.limits.memory_mib << 20}
        return limits

    def _explain(self, complaint: str) -> str:
        why = f"bubblewrap could not start the sandbox ({complaint or 'no reason given'})"
        if any(word in complaint.lower() for word in ("namespace", "uid map", "no space left", "clone")):
            return (
                f"{why}: user namespaces are not available here; allow them (`sysctl user.max_user_namespaces=10000 "
                f"kernel.unprivileged_userns_clone=1`) or use the Docker sandbox"
            )
        return f"{why}: bubblewrap 0.8 or newer and util-linux are needed"

    def _kill(self) -> str:
        process, group, stderr = self._process, self._cgroup, self._stderr
        complaint = ""
        if process is not None:
            # The monitor's death takes process 1 of the namespace with it, and that all others.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        if group is not None:
            group.remove()
        if stderr is not None and not stderr.closed:
            stderr.seek(0)
            complaint = stderr.read(4096).decode("utf-8", "replace")
            stderr.close()
        self._process = self._cgroup = self._stderr = None
        return complaint


def _memory_file(data: bytes):
    file = os.fdopen(os.memfd_create("sandbox"), "w+b", buffering=0)
    file.write(data)
    file.seek(0)
    return file


def _is_usr(path: str) -> bool:
    """An executable that the sandbox will see, too: one whose real file lies below /usr."""
    return os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/")


def _user_exists_here() -> bool:
    """Whether USER_ID is mapped in our own user namespace: root of a small namespace cannot become it, nor need it."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= USER_ID < first + count:
            return True
    return False
