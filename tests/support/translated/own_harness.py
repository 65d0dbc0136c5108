import verifiers.v1 as vf
from plain_tasks import PlainTask, tasks
from verifiers.v1.harnesses.null.harness import NullHarness


class LoudHarness(NullHarness):
    """Adds a word to the question."""

    def resolve_prompt(self, data):
        system_prompt, prompt = super().resolve_prompt(data)
        return system_prompt, f"{prompt}, loudly"


class OwnHarnessTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self) -> list[PlainTask]:
        return tasks(range(3), self.config.task)


__all__ = ["LoudHarness", "OwnHarnessTaskset"]
