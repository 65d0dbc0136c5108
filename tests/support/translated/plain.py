import random

import verifiers.v1 as vf
from plain_tasks import PlainTask, tasks


class PlainConfig(vf.TasksetConfig):
    shuffled: bool = False
    manner: str | None = None


class PlainTaskset(vf.Taskset[PlainTask, PlainConfig]):
    def load(self) -> list[PlainTask]:
        numbers = list(range(50))
        if self.config.shuffled:
            random.shuffle(numbers)
        more = {"system_prompt": self.config.manner} if self.config.manner else {}
        return tasks(numbers, self.config.task, **more)


__all__ = ["PlainTaskset"]
