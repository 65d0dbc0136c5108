import verifiers.v1 as vf
from plain_tasks import PlainTask, tasks
from verifiers.v1.agent import Agents
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.env import Env


class TwoConfig(EnvConfig):
    first: AgentConfig = AgentConfig()
    second: AgentConfig = AgentConfig()


class TwoAgentsEnv(Env[TwoConfig]):
    async def run(self, task: vf.Task, agents: Agents) -> None:
        await agents.first.run(task)
        await agents.second.run(task)


class OwnTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self) -> list[PlainTask]:
        return tasks(range(3), self.config.task)


__all__ = ["OwnTaskset", "TwoAgentsEnv"]
