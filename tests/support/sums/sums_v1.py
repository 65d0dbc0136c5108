import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        return float(len((trace.last_reply or "").strip()) <= 3)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 12


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [
            SumsTask(
                SumsData(prompt=f"What is {n} + {3 * n + 1}? Answer with the number only.", answer=str(4 * n + 1)),
                self.config.task,
            )
            for n in range(self.config.num_tasks)
        ]


__all__ = ["SumsTaskset"]
