import verifiers.v1 as vf

from noted.server import NotesConfig, NotesToolset


class NotedData(vf.TaskData):
    word: str


class NotedTask(vf.Task[NotedData]):
    @vf.reward(weight=1.0)
    async def told(self, trace: vf.Trace) -> float:
        return float(self.data.word in (trace.last_reply or ""))


class NotedConfig(vf.TasksetConfig):
    tools: NotesConfig = NotesConfig()


class NotedTaskset(vf.Taskset[NotedTask, NotedConfig]):
    @classmethod
    def toolsets(cls, config: NotedConfig) -> list[vf.Toolset]:
        return [NotesToolset(config.tools)]

    def load(self) -> list[NotedTask]:
        return [NotedTask(NotedData(idx=0, prompt="What is the word?", word="amber5"), self.config.task)]
