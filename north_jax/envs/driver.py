"""The program inside a sandbox: process 1 of its pid namespace, answering requests with commands run as its children.

Requests and answers are JSON preceded by four bytes of length (big-endian): standard input and output at start, kept
on descriptors no command sees. Operations: start, reset, run, read, write, verify. Standard library only, because the
source is handed to the sandbox's own `python3 -I -S`.

Why process 1: the kernel delivers it no signal from inside its namespace, SIGKILL and SIGSTOP included, so a command
cannot end it; `kill(-1)` from it ends every other process at once, forks in flight included; and every orphan becomes
its child, so "no child left to wait for" means "no process left". Not being dumpable closes /proc/1/mem and /proc/1/fd
to commands, which share its uid.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

PR_SET_DUMPABLE = 4
EXIT_TIMED_OUT, EXIT_CANNOT_RUN, EXIT_ABSENT = 124, 126, 3
READ_BYTES = 1 << 20  # largest file `read` hands over


class Driver:
    def __init__(self, wire_in, wire_out, config):
        self.wire_in, self.wire_out = wire_in, wire_out
        self.config = config
        self.libc = ctypes.CDLL(None)
        self.libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    # Requests

    def start(self):
        os.chdir(self.config["work"])
        return {"python": sys.version.split()[0]}

    def reset(self, files):
        for directory in self.config["scratch"]:
            empty(directory)
        lay(self.config["work"], files)
        return {}

    def run(self, command, timeout_s):
        return self.supervise(lambda: execute(command, self.config["env"]), timeout_s, self.config["output_bytes"])

    def verify(self, files, command, timeout_s):
        # No process of the agent is alive (each request ends with none), so nothing it made survives emptying this
        # directory, and nothing can be put there between laying the files and starting the command.
        vault = self.config["vault"]
        empty(vault)
        directory = os.path.join(vault, os.urandom(8).hex())
        os.mkdir(directory)
        lay(directory, files)
        env = {**self.config["env"], **self.config["verifier_env"], "VERIFIER_DIR": directory, "HOME": directory}
        result = self.supervise(lambda: execute(command, env), timeout_s, self.config["output_bytes"])
        empty(vault)
        return result

    def read(self, path, timeout_s):
        result = self.supervise(lambda: copy_out(path), timeout_s, READ_BYTES)
        if result["timed_out"] or result["truncated"]:
            return {"error": "took too long to read" if result["timed_out"] else f"holds more than {READ_BYTES} bytes"}
        if result["exit_code"] == EXIT_ABSENT:
            return {"text": None}
        return {"text": result["output"]} if result["exit_code"] == 0 else {"error": result["output"] or "read failed"}

    def write(self, path, text, timeout_s):
        result = self.supervise(lambda: lay(".", {path: text}), timeout_s, 4096)
        return {} if result["exit_code"] == 0 else {"error": result["output"] or "write failed"}

    # One supervised child

    def supervise(self, act, timeout_s, limit):
        """Run `act` in a child; then no process but this one is alive. File access goes this way too: a link laid by a
        command may lead to a pipe without end or to this process's own descriptors, which a child does not have."""
        deadline = time.monotonic() + timeout_s
        pipe_read, pipe_write = os.pipe()
        child = os.fork()
        if child == 0:
            self.become_child(act, pipe_write, timeout_s)
        os.close(pipe_write)
        ended = os.pidfd_open(child)
        poller = select.poll()
        for fd in (pipe_read, ended, self.wire_in):
            poller.register(fd, select.POLLIN)
        chunks, size, timed_out = [], 0, False
        while size <= limit:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                timed_out = True
                break
            events = {fd for fd, _ in poller.poll(left_s * 1000 + 1)}
            if self.wire_in in events:  # the host never speaks while it waits: it is gone
                os._exit(0)
            if pipe_read in events:
                chunk = os.read(pipe_read, 65536)
                chunks.append(chunk)
                size += len(chunk)
                if not chunk:
                    poller.unregister(pipe_read)
            elif ended in events:
                break
        status = end_all(child)
        os.set_blocking(pipe_read, False)
        while size <= limit:
            try:
                chunk = os.read(pipe_read, 65536)
            except BlockingIOError:
                break
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
        os.close(pipe_read)
        os.close(ended)
        code = os.waitstatus_to_exitcode(status)
        return {
            "exit_code": EXIT_TIMED_OUT if timed_out else code if code >= 0 else 128 - code,
            "output": b"".join(chunks)[:limit].decode("utf-8", "replace"),
            "timed_out": timed_out,
            "truncated": size > limit,
        }

    def become_child(self, act, pipe_write, timeout_s):
        code = EXIT_CANNOT_RUN
        try:
            os.setsid()
            os.dup2(pipe_write, 1)
            os.dup2(pipe_write, 2)
            os.closerange(3, max(self.wire_in, self.wire_out, pipe_write) + 1)
            # Out of memory, the kernel shall take a command before this driver; the file is writable when dumpable.
            self.libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            for name, value in {**self.config["rlimits"], "CPU": int(timeout_s) + 2}.items():
                which = getattr(resource, "RLIMIT_" + name)
                hard = resource.getrlimit(which)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(which, (value, value))
            # Python ignores these two; a command starts with the defaults.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            code = act() or 0
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            os.write(1, (reason or type(error).__name__).encode("utf-8", "replace"))
            code = EXIT_CANNOT_RUN
        finally:
            os._exit(code)


def execute(command, env):
    os.execve("/bin/bash", ["bash", "-c", command], env)


def copy_out(path):
    """Copy a regular file to the pipe; EXIT_ABSENT when there is none. Non-blocking, for a FIFO has no end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return EXIT_ABSENT
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return EXIT_ABSENT
    while chunk := os.read(fd, 65536):
        while chunk:
            chunk = chunk[os.write(1, chunk) :]
    return 0


def lay(base, files):
    """Write each file below `base`, making parents; a text that starts with #! becomes executable."""
    made = set()
    for path, text in files.items():
        path = os.path.join(base, path)
        parent = os.path.dirname(path)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        data = memoryview(text.encode("utf-8", "replace"))
        # A file that exists keeps its mode; O_NONBLOCK makes a FIFO without reader an error instead of a wait.
        mode = 0o755 if text.startswith("#!") else 0o644
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode)
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)


def empty(directory):
    """Remove all that a directory holds. Subdirectories are moved up first, so no depth of nesting is too deep."""
    if stat.S_IMODE(os.stat(directory).st_mode) & 0o700 != 0o700:
        os.chmod(directory, 0o755)
    moved, found = 0, True
    while found:  # once more after each pass with a find: what was moved up may have been missed
        found = False
        with os.scandir(directory) as entries:
            for entry in entries:
                found = True
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                with os.scandir(entry.path) as children:
                    for child in children:
                        if child.is_dir(follow_symlinks=False):
                            os.chmod(child.path, 0o700)
                            os.rename(child.path, os.path.join(directory, f".{os.urandom(8).hex()}.{moved}"))
                            moved += 1
                        else:
                            os.unlink(child.path)
                with contextlib.suppress(OSError):  # not yet empty: the next pass
                    os.rmdir(entry.path)


def end_all(child):
    """Kill and reap every other process of the namespace; the wait status of `child`."""
    status = None
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == child:
            status = ended


def read_exactly(fd, size):
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive(fd):
    return json.loads(read_exactly(fd, struct.unpack(">I", read_exactly(fd, 4))[0]))


def send(fd, message):
    body = json.dumps(message).encode()
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def main():
    if os.getpid() != 1:
        raise SystemExit("the sandbox driver must be process 1 of its own pid namespace")
    for number in range(1, 32):  # Python's own SIGINT handler would let a command interrupt this process
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN if number in (signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL)
    wire_in, wire_out = os.dup(0), os.dup(1)  # not inheritable, unlike 0 and 1
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    send(wire_out, {"ready": True})  # the host waits for it: what read the source may have read ahead
    driver = None
    while True:
        request = receive(wire_in)
        number, operation, arguments = request["id"], request["op"], request["arguments"]
        if driver is None:
            driver = Driver(wire_in, wire_out, arguments.pop("config"))
        send(wire_out, {"id": number, **getattr(driver, operation)(**arguments)})


if __name__ == "__main__":
    main()
