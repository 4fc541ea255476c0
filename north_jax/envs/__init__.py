"""Tasks, their verifiers, and the sandboxes that commands run in."""

from north_jax.envs import software_tasks, terminal_tasks  # registers the templates
from north_jax.envs.pool import SandboxPool
from north_jax.envs.sandbox import CommandResult, Limits, Sandbox, SandboxDied, SandboxUnavailable

__all__ = [
    "CommandResult",
    "Limits",
    "Sandbox",
    "SandboxDied",
    "SandboxPool",
    "SandboxUnavailable",
    "make_sandbox",
    "software_tasks",
    "terminal_tasks",
]


def make_sandbox(kind: str = "bubblewrap", limits: Limits | None = None) -> Sandbox:
    """A sandbox of the kind "bubblewrap" or "docker", not yet started (`start()` or a with-block does that).

    Raises SandboxUnavailable, with the remedy, when this machine lacks what the kind needs, ValueError for another.
    """
    if kind == "bubblewrap":
        from north_jax.envs.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(limits)
    if kind == "docker":
        from north_jax.envs.docker_engine import DockerSandbox

        return DockerSandbox(limits)
    raise ValueError(f"there is no sandbox of the kind {kind!r}: use 'bubblewrap' or 'docker'")
