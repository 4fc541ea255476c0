import os
import subprocess

import pytest

pytest.register_assert_rewrite("same")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 700 kB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not let root mount a tmpfs: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)
