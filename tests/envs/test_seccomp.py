import json
import platform
import struct

import pytest

from north_jax.envs import seccomp


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the BPF filter is for x86-64")
def test_program_is_well_formed():
    program = seccomp.bpf()
    assert len(program) % 8 == 0
    instructions = list(struct.iter_unpack("<HBBI", program))
    assert len(instructions) < 4096
    for place, (code, yes, no, _) in enumerate(instructions):
        if code in (seccomp._JEQ, seccomp._JGE, seccomp._JSET):
            assert place + 1 + max(yes, no) < len(instructions)
    assert instructions[-1] == (seccomp._RET, 0, 0, seccomp._ALLOW)


@pytest.mark.parametrize(
    ("arch", "number", "arguments", "outcome"),
    [
        (seccomp._ARCH_X86_64, 0, [], "allow"),  # read
        (0x40000003, 0, [], 38),  # 32-bit
        (seccomp._ARCH_X86_64, 0x40000000, [], 38),
        (seccomp._ARCH_X86_64, 165, [], 1),  # mount
        (seccomp._ARCH_X86_64, 435, [], 38),  # clone3
        (seccomp._ARCH_X86_64, 56, [17], "allow"),  # clone as fork does
        (seccomp._ARCH_X86_64, 56, [0x3D0F00], "allow"),  # clone of a thread
        (seccomp._ARCH_X86_64, 56, [0x10000000 | 17], 1),
        (seccomp._ARCH_X86_64, 56, [0x00020000 | 17], 1),
        *[(seccomp._ARCH_X86_64, call, [f], "allow") for f in (1, 2, 10) for call in (41, 53)],
        *[(seccomp._ARCH_X86_64, call, [f], 97) for f in (0, 3, 16, 17, 38, 40) for call in (41, 53)],
        (seccomp._ARCH_X86_64, 302, [0], "allow"),
        (seccomp._ARCH_X86_64, 302, [1], 1),
        (seccomp._ARCH_X86_64, 141, [0, 0], "allow"),
        (seccomp._ARCH_X86_64, 141, [0, 1], 1),
        (seccomp._ARCH_X86_64, 141, [2, 0], 1),
    ],
)
def test_verdicts(monkeypatch, arch, number, arguments, outcome):
    """The program's verdicts, by a small interpreter of the five instructions it uses."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    data = struct.pack("<IIQ", number, arch, 0) + struct.pack("<6Q", *(arguments + [0] * 6)[:6])
    instructions = list(struct.iter_unpack("<HBBI", seccomp.bpf()))
    place, value = 0, 0
    while True:
        code, yes, no, k = instructions[place]
        place += 1
        if code == seccomp._RET:
            assert ("allow" if k == seccomp._ALLOW else k & 0xFFFF) == outcome
            return
        if code == seccomp._LOAD:
            (value,) = struct.unpack_from("<I", data, k)
        else:
            hit = {seccomp._JEQ: value == k, seccomp._JGE: value >= k, seccomp._JSET: bool(value & k)}[code]
            place += yes if hit else no


def test_other_architectures_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(NotImplementedError, match="this machine is aarch64: use the Docker sandbox"):
        seccomp.bpf()


def test_docker_profile_has_every_rule():
    profile = json.loads(seccomp.docker_profile())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    named = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert named == {*seccomp.DENIED, *seccomp.SOCKETS, *seccomp.SELF_ONLY, "clone", "clone3"}
