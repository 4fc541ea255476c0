"""One episode: a task, a harness and a sandbox, driven by parsed completions, for rollouts and for recordings."""

import dataclasses

from north_jax.agents.harness import Harness, InvalidAction, Submit, perform, start_messages
from north_jax.chat.format import Completion
from north_jax.envs.sandbox import Sandbox
from north_jax.envs.tasks import Task

# How an episode ends. The first two come from the verifier; the others are reward 0 without asking it, but for
# `environment_failure`, which is no outcome of the policy: such an episode leaves its group's baseline.
STATUSES = ("solved", "wrong", "out_of_budget", "invalid_action", "environment_failure")


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The message to show next, or the end: exactly one of `message` and `status` is set."""

    message: dict | None = None
    status: str | None = None
    detail: str = ""


class Episode:
    """Lays the task's files, then carries out one action a turn until submit, an invalid action or the budget."""

    def __init__(self, task: Task, harness: Harness, sandbox: Sandbox):
        self.task, self.harness, self.sandbox = task, harness, sandbox
        self.turns = 0
        sandbox.reset(dict(task.files))

    def start(self) -> list[dict]:
        return start_messages(self.harness, self.task)

    def step(self, completion: Completion) -> StepResult:
        """Carries out the completion's action. Raises SandboxDied when the sandbox is lost."""
        self.turns += 1
        try:
            action = self.harness.action(completion)
        except InvalidAction as error:
            return StepResult(status="invalid_action", detail=str(error))
        if isinstance(action, Submit):
            return StepResult(status="solved" if self.solved() else "wrong")
        if self.turns >= self.task.max_turns:
            return StepResult(status="out_of_budget", detail=f"{self.task.max_turns} turns used")
        try:
            exit_code, output = perform(action, self.sandbox)
        except ValueError as error:  # a path outside the work directory
            exit_code, output = 1, f"{error}\n"
        return StepResult(message=self.harness.observation(exit_code, output))

    def solved(self) -> bool:
        """The verifier's word on the state of the work directory."""
        return self.sandbox.verify(dict(self.task.verifier_files), self.task.verifier).exit_code == 0
