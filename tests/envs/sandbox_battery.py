"""What every sandbox must do, written once; each backend's test file subclasses it and supplies `sandbox` and `make`.

Fixtures of a subclass: `make(limits=None)` an unstarted sandbox, `sandbox` a started one, freshly reset, and the
function `driver_pid(sandbox)`, the host's number of the process that is number 1 inside.
"""

import contextlib
import os
import signal
import socket
import textwrap
import threading
import time

import pytest

from north_jax.envs import CommandResult, Limits, SandboxDied, SandboxPool

LIMITS = Limits(memory_mib=256, pids=64, box_mib=32, tmp_mib=32)


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def python(source: str) -> str:
    """A command that runs `source` with the sandbox's Python."""
    return "/usr/bin/python3 -I -S - <<'PYTHON'\n" + textwrap.dedent(source) + "\nPYTHON"


class SandboxBattery:
    # Commands

    @pytest.mark.parametrize(
        ("command", "code"),
        [("true", 0), ("false", 1), ("exit 7", 7), ("nonesuch", 127), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
    )
    def test_exit_codes(self, sandbox, command, code):
        assert sandbox.run(command).exit_code == code

    def test_output_in_order_and_result_fields(self, sandbox):
        result = sandbox.run("echo one; echo two >&2; printf 'drei ü'; exit 3")
        assert result == CommandResult(exit_code=3, output="one\ntwo\ndrei ü", timed_out=False, truncated=False)

    def test_command_is_bash_in_the_work_directory_without_input(self, sandbox):
        result = sandbox.run('[[ -n $BASH_VERSION ]] && pwd && cat && echo "$HOME $PATH $LANG $(id -u)"')
        assert result.output == "/box\n/box /usr/local/bin:/usr/bin:/bin C.UTF-8 1000\n"

    def test_nothing_of_the_host_environment(self, sandbox, monkeypatch):
        monkeypatch.setenv("NORTH_SECRET", "hunter2")
        assert "hunter2" not in sandbox.run("env; cat /proc/*/environ").output

    def test_output_that_is_not_utf8(self, sandbox):
        assert sandbox.run(r"printf 'a\xffb\0c'").output == "a\ufffdb\0c"

    def test_command_that_cannot_start(self, sandbox):
        assert sandbox.run("echo " + "x" * 200_000).exit_code == 126
        assert sandbox.run("echo a\0b").exit_code == 126
        assert sandbox.run("echo well").output == "well\n"

    def test_command_that_closes_its_output(self, sandbox):
        assert sandbox.run("exec >&- 2>&-; sleep 0.05; exit 5").exit_code == 5

    # Files

    def test_files_laid_read_and_written(self, sandbox):
        sandbox.reset({"a.txt": "alpha\n", "deep/er/b.py": "x = 'ü'\n", "go.sh": "#!/bin/sh\necho went\n"})
        assert sandbox.read("a.txt") == "alpha\n"
        assert sandbox.read("/box/deep/er/b.py") == "x = 'ü'\n"
        assert sandbox.read("absent") is None
        assert sandbox.read("deep") is None
        assert sandbox.read("a.txt/x") is None
        sandbox.write("new/c.txt", "crlf\r\n")
        assert sandbox.read("new/c.txt") == "crlf\r\n"
        assert sandbox.run("./go.sh; cat new/c.txt").output == "went\ncrlf\r\n"
        sandbox.write("go.sh", "#!/bin/sh\necho again\n")
        assert sandbox.run("./go.sh").output == "again\n"

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", "/box", "/boxer/x", "a\0b"])
    def test_paths_outside_are_refused(self, sandbox, path):
        for call in (
            lambda: sandbox.read(path),
            lambda: sandbox.write(path, ""),
            lambda: sandbox.reset({path: ""}),
            lambda: sandbox.verify({path: ""}, "true"),
        ):
            with pytest.raises(ValueError, match="work directory"):
                call()
        assert sandbox.run("true").exit_code == 0

    def test_files_that_cannot_be_read_or_written(self, sandbox):
        sandbox.run("mkdir d; echo s > locked; chmod 000 locked; head -c 2000000 /dev/zero > big; mkfifo fifo")
        sandbox.run("ln -s /dev/zero endless; ln -s loop loop")
        assert sandbox.read("fifo") is None
        assert sandbox.read("endless") is None
        for path in ("locked", "big", "loop"):
            with pytest.raises(ValueError, match=f"cannot read {path}: "):
                sandbox.read(path)
        for path in ("d", "locked/x", "fifo"):
            with pytest.raises(ValueError, match=f"cannot write {path}: "):
                sandbox.write(path, "text")
        with pytest.raises(ValueError, match="cannot write huge"):
            sandbox.write("huge", "x" * (LIMITS.box_mib << 20))
        assert sandbox.run("true").exit_code == 0

    def test_links_laid_by_a_command_do_not_reach_the_driver(self, sandbox):
        sandbox.run("for n in 0 1 2 3 4 5 6; do ln -s /proc/self/fd/$n fd$n; ln -s /proc/1/fd/$n one$n; done")
        sandbox.run("ln -s /proc/self/mem mem; ln -s /proc/1/mem mem1; ln -s /proc/1/environ env; ln -s a.txt link")
        for name in ("mem", "mem1", "env", *(f"{kind}{n}" for n in range(7) for kind in ("fd", "one"))):
            for call in (lambda n: sandbox.read(n), lambda n: sandbox.write(n, '{"id": 0}')):
                with contextlib.suppress(ValueError):
                    call(name)
        sandbox.write("a.txt", "inside")
        assert sandbox.read("link") == "inside"
        assert sandbox.run("echo well").output == "well\n"

    def test_state_lasts_within_an_episode_and_not_across_reset(self, sandbox):
        sandbox.reset({"kept.txt": "1"})
        sandbox.run("echo 2 > new.txt; mkdir -p .hidden/d; echo 3 > .hidden/d/f; echo 4 > /tmp/t; echo 5 > /dev/shm/s")
        sandbox.run("echo 6 > /run/r; chmod 000 .hidden; mkdir sealed; touch sealed/x; chmod 500 sealed; ln -s / root")
        assert sandbox.run("cat new.txt /tmp/t").output == "2\n4\n"
        sandbox.run("chmod 000 /tmp /run; chmod 000 /box")
        sandbox.reset({"fresh.txt": "f"})
        listing = sandbox.run("ls -A /box /tmp /run /dev/shm; stat -c %a /box; echo x > /tmp/y && echo ok").output
        assert listing.split() == ["/box:", "fresh.txt", "/dev/shm:", "/run:", "/tmp:", "755", "ok"]

    def test_reset_of_a_tree_deeper_than_any_path(self, sandbox):
        source = "import os\nfor _ in range(3000):\n os.mkdir('dddddddd'); os.chdir('dddddddd')\nopen('f', 'w').close()"
        assert sandbox.run(python(source)).exit_code == 0
        sandbox.reset()
        assert sandbox.run("ls -A").output == ""

    def test_nothing_else_can_be_written(self, sandbox):
        written = "for d in / /usr /usr/bin /usr/local/bin /etc /var /dev /sys /home /root /lib; do "
        written += "(echo x > $d/planted) 2>/dev/null && echo $d; done; true"
        assert sandbox.run(written).output == ""
        assert sandbox.run("(echo x >> /etc/passwd) 2>/dev/null").exit_code != 0
        assert sandbox.run("mount -t tmpfs none /box; umount /tmp; chroot / true").exit_code != 0
        for path in ("/proc/sys/kernel/panic_on_oops", "/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger"):
            assert sandbox.run(f"test -w {path}").exit_code != 0, path

    # Limits

    def test_timeout_kills_everything(self, sandbox):
        sandbox.reset({})
        began = time.monotonic()
        result = sandbox.run(
            "trap '' TERM HUP INT; setsid bash -c 'trap \"\" TERM; while :; do date +%s%N > beat; sleep 0.02; done' & "
            "nohup sleep 100 & echo before; sleep 100",
            timeout_s=0.5,
        )
        assert time.monotonic() - began < 5
        assert (result.exit_code, result.timed_out, result.truncated) == (124, True, False)
        assert "before" in result.output
        beat = sandbox.read("beat")
        time.sleep(0.1)
        assert sandbox.read("beat") == beat
        assert sandbox.run("set -- /proc/[0-9]*; echo $#").output == "2\n"  # the driver and bash

    def test_background_processes_end_with_their_command(self, sandbox):
        began = time.monotonic()
        result = sandbox.run("setsid nohup sleep 100 & (sleep 100; echo late) & disown -a; echo done")
        assert result.output == "done\n" and result.exit_code == 0
        assert time.monotonic() - began < 5
        assert "sleep" not in sandbox.run("cat /proc/[0-9]*/comm").output

    @pytest.mark.parametrize("command", ["yes", "yes & yes & sleep 100", "cat /dev/zero", "head -c 65537 /dev/zero"])
    def test_flood_is_cut(self, sandbox, command):
        began = time.monotonic()
        result = sandbox.run(command, timeout_s=30)
        assert time.monotonic() - began < 5
        assert result.truncated and not result.timed_out
        assert len(result.output) == 65536

    def test_largest_whole_output(self, sandbox):
        result = sandbox.run("head -c 65536 /dev/zero | tr '\\0' x")
        assert not result.truncated and result.output == "x" * 65536

    def test_memory_limit(self, sandbox):
        result = sandbox.run(python("print(len(bytearray(1 << 30)))"), timeout_s=20)
        assert result.exit_code != 0 and str(1 << 30) not in result.output
        assert sandbox.run("echo well").output == "well\n"

    def test_file_limits(self, sandbox):
        for path in ("/box/big", "/tmp/big", "/run/big", "/dev/shm/big"):
            assert sandbox.run(f"head -c 200000000 /dev/zero > {path}", timeout_s=20).exit_code != 0
        sandbox.reset({"a": "b"})
        assert sandbox.run("cat a").output == "b"
        assert sandbox.run("ulimit -c").output == "0\n"

    def test_fork_bomb_is_held(self, sandbox):
        began = time.monotonic()
        result = sandbox.run("b() { b | b & }; b; sleep 100", timeout_s=1)
        assert time.monotonic() - began < 9
        assert result.timed_out or result.truncated
        assert sandbox.run("set -- /proc/[0-9]*; echo $#").output == "2\n"
        count = python(
            """
            import os, time
            n = 0
            try:
                while n < 1000:
                    if os.fork() == 0:
                        time.sleep(60)
                    n += 1
            except OSError:
                pass
            print(n)
            """
        )
        assert 10 < int(sandbox.run(count, timeout_s=20).output) <= LIMITS.pids + 4

    # Walls

    def test_no_network(self, sandbox):
        result = sandbox.run(
            python(
                """
                import socket
                for name, family, address in [
                    ("inet", socket.AF_INET, ("1.1.1.1", 53)),
                    ("vsock", 40, (2, 1024)),
                    ("netlink", 16, None),
                    ("packet", 17, None),
                    ("alg", 38, None),
                ]:
                    try:
                        s = socket.socket(family, socket.SOCK_STREAM if address else socket.SOCK_RAW)
                        s.settimeout(2)
                        if address:
                            s.connect(address)
                        print(name, "OPEN")
                    except OSError as error:
                        print(name, error.errno)
                a, b = socket.socketpair()
                a.send(b"x")
                print("unix", b.recv(1))
                """
            )
        )
        assert result.output.splitlines() == ["inet 101", "vsock 97", "netlink 97", "packet 97", "alg 97", "unix b'x'"]

    def test_loopback_is_its_own(self, sandbox):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert sandbox.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}").exit_code != 0

    def test_refused_system_calls(self, sandbox):
        result = sandbox.run(
            python(
                """
                import ctypes, errno
                libc = ctypes.CDLL(None, use_errno=True)
                for name, number, *args in [
                    ("unshare", 272, 0x10000000), ("clone-newuser", 56, 0x10000011, 0, 0, 0, 0), ("clone3", 435, 0, 0),
                    ("mount", 165, 0, 0, 0, 0, 0), ("setns", 308, 0, 0), ("bpf", 321, 0, 0, 0), ("keyctl", 250, 0, 0),
                    ("ptrace", 101, 16, 1), ("io_uring_setup", 425, 8, 0), ("shmget", 29, 0, 4096, 0o1600),
                    ("mq_open", 240, 0, 0), ("userfaultfd", 323, 0), ("perf_event_open", 298, 0, 0, 0, 0, 0),
                    ("prlimit-driver", 302, 1, 7, 0, 0), ("prlimit-self", 302, 0, 7, 0, 0),
                    ("renice-driver", 141, 0, 1, 19), ("renice-user", 141, 2, 0, 19), ("renice-self", 141, 0, 0, 5),
                    ("process_vm_readv", 310, 1, 0, 0, 0, 0, 0),
                ]:
                    ctypes.set_errno(0)
                    code = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
                    print(name, "ok" if code >= 0 else errno.errorcode[ctypes.get_errno()])
                """
            )
        )
        assert result.exit_code == 0, result
        outcome = dict(line.split() for line in result.output.splitlines())
        assert outcome.pop("clone3") == "ENOSYS"
        assert outcome.pop("prlimit-self") == "ok"
        assert outcome.pop("renice-self") == "ok"
        assert outcome == dict.fromkeys(outcome, "EPERM") and len(outcome) == 16

    def test_calls_of_the_x32_kind_do_nothing(self, sandbox):
        result = sandbox.run(python("import ctypes; print(ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39)))"))
        assert (result.exit_code, result.output) == (0, "-1\n") or result.exit_code == 159  # refused or SIGSYS

    def test_no_privileges(self, sandbox):
        status = sandbox.run("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status").output.split()
        fields = dict(zip(status[::2], status[1::2], strict=True))
        assert fields.pop("NoNewPrivs:") == "1" and fields.pop("Seccomp:") == "2"
        assert fields == dict.fromkeys(fields, "0" * 16) and len(fields) == 5

    def test_host_is_invisible(self, sandbox, tmp_path):
        secret = tmp_path / "secret"
        secret.write_text("host secret")
        assert sandbox.run(f"cat {secret}; ls /root /home /work {tmp_path}").output.count("host secret") == 0
        mine = str(os.getpid())
        listing = sandbox.run("ls /proc | grep '^[0-9]'; cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output
        assert mine not in listing.splitlines() and "pytest" not in listing
        assert "north_jax" not in listing and str(tmp_path) not in sandbox.run("cat /proc/1/cmdline").output

    def test_driver_cannot_be_touched(self, sandbox):
        for command in (
            "kill -9 1",
            "kill -STOP 1",
            "kill -INT 1; kill -TERM 1; kill -HUP 1; kill -USR1 1; kill -ALRM 1; kill -PIPE 1; kill -CHLD 1",
            "kill -9 -1",
            "kill -STOP -1",
            "kill -STOP $$",
            "for n in $(seq 64); do kill -$n 1; done",
            "cat /proc/1/mem /proc/1/fd/*; echo 'x' > /proc/1/fd/0; echo 0 > /proc/1/oom_score_adj",
            "cat /proc/1/environ /proc/1/maps",
            "ls /proc/1/fd /proc/1/cwd/ /proc/1/root/",
        ):
            assert sandbox.run(command, timeout_s=0.3).exit_code != 0 or command.startswith(("kill", "for")), command
            assert sandbox.run("echo well").output == "well\n", command

    # Verifier

    def test_verifier_sees_the_work_and_its_own_files(self, sandbox):
        sandbox.reset({"answer": "42\n"})
        files = {"check.sh": 'cmp answer "$VERIFIER_DIR/data/want" && pwd', "data/want": "42\n"}
        command = 'bash "$VERIFIER_DIR/check.sh"'
        assert sandbox.verify(files, command) == CommandResult(exit_code=0, output="/box\n")
        sandbox.write("answer", "41\n")
        assert sandbox.verify(files, command).exit_code == 1
        assert sandbox.verify({}, "sleep 60", timeout_s=0.2) == CommandResult(124, "", timed_out=True)
        assert sandbox.verify({}, "yes").truncated

    def test_agent_cannot_read_verifier_files(self, sandbox):
        sandbox.reset({})
        spy = "(while :; do cat /run/*/* /tmp/*/* >> /box/seen 2>/dev/null; done) &"
        sandbox.run(f"{spy} setsid nohup bash -c '{spy} wait' >/dev/null 2>&1 & sleep 0.1")
        first = sandbox.verify({"want": "the-answer\n"}, 'echo "$VERIFIER_DIR"; sleep 0.1').output
        second = sandbox.verify({"want": "the-answer\n"}, 'echo "$VERIFIER_DIR"').output
        assert first != second
        assert "the-answer" not in (sandbox.read("seen") or "")
        found = sandbox.run("ls -A /run; grep -rs the-answer /run /tmp /box /dev/shm /proc/1/cwd; echo $VERIFIER_DIR")
        assert found.output == "\n"

    def test_verifier_is_not_forged_by_what_was_planted(self, sandbox):
        evil = "import os\nos.write(1, b'FORGED')\nos._exit(0)\n"
        site = "/box/.local/lib/python3.{}/site-packages"
        names = ["sitecustomize.py", "usercustomize.py", "json.py", "os.py", "unittest/__init__.py", "site.py"]
        sandbox.reset(dict.fromkeys(names, evil))
        sandbox.run(
            "for n in $(seq 8 15); do d="
            + site.format("$n")
            + "; mkdir -p $d; cp sitecustomize.py usercustomize.py $d; "
            "echo 'import os; os._exit(0)' > $d/evil.pth; done; "
            "printf '#!/bin/sh\necho FORGED\nexit 0\n' > python3; chmod +x python3; "
            "cp python3 bash; cp python3 test; cp python3 cmp; mkdir -p /box/bin; cp python3 /box/bin; "
            "echo 'exit 0' | tee .bashrc .bash_profile .profile .bash_env; "
            "export PATH=/box:$PATH BASH_ENV=/box/.bash_env PYTHONPATH=/box PYTHONSTARTUP=/box/os.py; "
            "mkdir -p /run/fake; cp -r . /tmp/ ; cp *.py /run/"
        )
        # A background process that fights for the verdict: alive when the command returns, were it not ended.
        sandbox.run("nohup setsid bash -c 'while :; do echo right > /box/answer; done' >/dev/null 2>&1 & sleep 0.05")
        sandbox.run("echo wrong > answer")
        check = "import json, sys, unittest\nsys.exit(open('answer').read() != 'right\\n')\n"
        for command in ('python3 "$VERIFIER_DIR/check.py"', 'python3 -c "$(cat $VERIFIER_DIR/check.py)"'):
            result = sandbox.verify({"check.py": check}, command)
            assert (result.exit_code, result.output) == (1, ""), command
        assert sandbox.verify({}, "python3 -m json.tool answer").exit_code == 1
        assert sandbox.verify({"want": "right\n"}, 'cmp -s answer "$VERIFIER_DIR/want"').exit_code == 1
        assert sandbox.verify({}, "bash -c 'test -e nowhere'").exit_code == 1
        assert sandbox.verify({}, 'ls -A "$VERIFIER_DIR" /run | grep -c .').output == "3\n"
        sandbox.run("echo right > answer")
        assert sandbox.verify({"check.py": check}, 'python3 "$VERIFIER_DIR/check.py"').exit_code == 0

    def test_verifier_asks_for_the_work_directory(self, sandbox):
        sandbox.reset({"mine.py": "value = 5\n"})
        assert sandbox.verify({}, "python3 -c 'import mine'").exit_code == 1
        assert sandbox.verify({}, "PYTHONPATH=. python3 -c 'import mine; print(mine.value)'").output == "5\n"

    # Death

    def test_a_killed_driver_is_reported_and_replaced(self, make, driver_pid):
        with SandboxPool(lambda: make(LIMITS), 1) as pool:
            sandbox = pool.acquire()
            os.kill(driver_pid(sandbox), signal.SIGKILL)
            with pytest.raises(SandboxDied):
                sandbox.run("echo never")
            assert not sandbox.alive
            with pytest.raises(SandboxDied):
                sandbox.reset()
            pool.release(sandbox)
            with pool.lend() as fresh:
                assert fresh is not sandbox
                assert fresh.run("echo back").output == "back\n"
            assert pool.starts == 2

    def test_death_during_a_command(self, make, driver_pid):
        with make(LIMITS) as sandbox:
            pid = driver_pid(sandbox)
            timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
            timer.start()
            began = time.monotonic()
            with pytest.raises(SandboxDied, match="'run'"):
                sandbox.run("sleep 30", timeout_s=30)
            assert time.monotonic() - began < 10
            timer.join()
            assert not os.path.exists(f"/proc/{pid}")

    def test_a_stopped_driver_meets_the_deadline(self, make, driver_pid, monkeypatch):
        monkeypatch.setattr("north_jax.envs.sandbox._GRACE_S", 0.5)
        with make(LIMITS) as sandbox:
            os.kill(driver_pid(sandbox), signal.SIGSTOP)
            with pytest.raises(SandboxDied, match="did not answer 'run' within"):
                sandbox.run("true", timeout_s=0.5)
            assert not sandbox.alive

    def test_stop_from_another_thread(self, make):
        sandbox = make(LIMITS).start()
        threading.Timer(0.3, sandbox.stop).start()
        with pytest.raises(SandboxDied):
            sandbox.run("sleep 30", timeout_s=30)
        sandbox.stop()

    def test_stop_leaves_nothing(self, make, driver_pid):
        sandbox = make(LIMITS).start()
        pid = driver_pid(sandbox)
        sandbox.stop()
        sandbox.stop()
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        with pytest.raises(SandboxDied, match="stopped"):
            sandbox.run("true")
        with sandbox.start() as again:
            assert again.run("echo again").output == "again\n"
