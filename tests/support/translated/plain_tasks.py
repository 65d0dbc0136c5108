"""Tasks of verifiers for the tasksets beside it."""

import verifiers.v1 as vf


class PlainData(vf.TaskData):
    answer: str


class PlainTask(vf.Task[PlainData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


def tasks(numbers, config, **more):
    return [
        PlainTask(PlainData(idx=i, prompt=f"Say {n}", answer=str(n), **more), config) for i, n in enumerate(numbers)
    ]
