"""Several processes of one run on this machine, each with CPU devices of its own."""

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]


def run_together(
    command: Sequence[str], *, processes: int = 2, devices: int = 4, environment: dict | None = None
) -> tuple[list[int], list[str]]:
    """(exit codes, output) of `python COMMAND` in so many processes that know of one another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    common |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # programs that take seconds to compile and run for milliseconds
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "parallel"))),
        **(environment or {}),
    }
    running = [
        subprocess.Popen(
            [sys.executable, *command], env=common | {"JAX_PROCESS_ID": str(number)}, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for number in range(processes)
    ]  # fmt: skip
    said = []
    try:
        for process in running:
            said.append(process.communicate(timeout=200)[0])
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()
    return [process.returncode for process in running], said
