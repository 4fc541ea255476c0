"""The system calls a sandbox refuses, as a BPF program for bubblewrap and as a profile for the Docker Engine.

Everything is allowed but: what makes or enters namespaces and mounts, what loads code into the kernel or sets the
machine's state, what looks into or slows other processes, kernel objects that would outlive an episode (System V
IPC, POSIX message queues, keyrings), and sockets other than Unix and IP. AF_VSOCK in particular belongs to no network
namespace, so "no network" alone would leave it open.
"""

from __future__ import annotations

import json
import platform
import struct

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97

DENIED = {  # name: number on x86-64
    "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69,
    "msgrcv": 70, "msgctl": 71, "ptrace": 101, "syslog": 103, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155,
    "adjtimex": 159, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "semtimedop": 220, "clock_settime": 227, "mq_open": 240, "mq_unlink": 241,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272,
    "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "ioprio_set": 251, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip
# clone3 passes its flags by pointer, out of a filter's sight; refused as unknown, libc falls back to clone.
CLONE, CLONE3 = 56, 435
CLONE_NEW = 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00020000
SOCKETS = {"socket": 41, "socketpair": 53}
FAMILIES = 1, 2, 10  # AF_UNIX, AF_INET, AF_INET6
# Calls that change another process's limits or priority: only with 0 ("this process") in the arguments listed.
SELF_ONLY = {
    "prlimit64": (302, [0]), "sched_setaffinity": (203, [0]), "sched_setscheduler": (144, [0]),
    "sched_setparam": (142, [0]), "sched_setattr": (314, [0]), "setpriority": (141, [0, 1]),
}  # fmt: skip

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ARCH_X86_64 = 0xC000003E


def bpf() -> bytes:
    """The filter as an array of `struct sock_filter`, for `bwrap --seccomp`.

    Raises NotImplementedError on another architecture than x86-64, whose system call numbers it does not know.
    """
    if platform.machine() != "x86_64":
        raise NotImplementedError(
            f"the bubblewrap sandbox's seccomp filter knows the system calls of x86-64 only and this machine is "
            f"{platform.machine()}: use the Docker sandbox, whose filter goes by name"
        )
    program: list[tuple[int, int, int, int]] = []

    def op(code: int, k: int, yes: int = 0, no: int = 0) -> None:
        program.append((code, yes, no, k))

    def argument(index: int) -> None:
        op(_LOAD, 16 + 8 * index)  # low half; every argument tested here is a C int or fits in 32 bits

    op(_LOAD, 4)
    op(_JEQ, _ARCH_X86_64, yes=1)
    op(_RET, _ERRNO | ENOSYS)
    op(_LOAD, 0)
    op(_JGE, 0x40000000, no=1)  # the x32 calls
    op(_RET, _ERRNO | ENOSYS)
    for number in DENIED.values():
        op(_JEQ, number, no=1)
        op(_RET, _ERRNO | EPERM)
    op(_JEQ, CLONE3, no=1)
    op(_RET, _ERRNO | ENOSYS)
    op(_JEQ, CLONE, no=4)
    argument(0)
    op(_JSET, sum(CLONE_NEW), no=1)
    op(_RET, _ERRNO | EPERM)
    op(_RET, _ALLOW)
    for number in SOCKETS.values():
        op(_JEQ, number, no=len(FAMILIES) + 3)
        argument(0)
        for place, family in enumerate(FAMILIES):
            op(_JEQ, family, yes=len(FAMILIES) - place)
        op(_RET, _ERRNO | EAFNOSUPPORT)
        op(_RET, _ALLOW)
    for number, indices in SELF_ONLY.values():
        op(_JEQ, number, no=3 * len(indices) + 1)
        for index in indices:
            argument(index)
            op(_JEQ, 0, yes=1)
            op(_RET, _ERRNO | EPERM)
        op(_RET, _ALLOW)
    op(_RET, _ALLOW)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def docker_profile() -> str:
    """The same rules as JSON text for `security_opt=["seccomp=" + text]`; calls by name, so for any architecture."""

    def rule(names, errno=EPERM, **test) -> dict:
        args = [test] if test else []
        return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": errno, "args": args}

    rules = [rule(DENIED), rule(["clone3"], ENOSYS)]
    rules += [rule(["clone"], index=0, value=flag, valueTwo=flag, op="SCMP_CMP_MASKED_EQ") for flag in CLONE_NEW]
    for family in range(max(FAMILIES)):
        if family not in FAMILIES:
            rules.append(rule(SOCKETS, EAFNOSUPPORT, index=0, value=family, op="SCMP_CMP_EQ"))
    rules.append(rule(SOCKETS, EAFNOSUPPORT, index=0, value=max(FAMILIES), op="SCMP_CMP_GT"))
    for name, (_, indices) in SELF_ONLY.items():
        rules += [rule([name], index=index, value=0, op="SCMP_CMP_NE") for index in indices]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
