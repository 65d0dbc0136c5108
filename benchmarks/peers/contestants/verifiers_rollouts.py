"""Four-turn rollouts of verifiers, with the cheapest harness its contract allows: one in its own process."""

import asyncio
import json
import sys
import time  # measured

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.interception import server

__all__ = ["Arithmetic", "InProcess"]


def calculate(a, op, b):
    return {"+": a + b, "-": a - b, "*": a * b}[op]


TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "One operation on two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "op": {"enum": ["+", "-", "*"]}, "b": {"type": "integer"}},
            "required": ["a", "op", "b"],
        },
    },
}


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class Arithmetic(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        return [Sum(Data(idx=n, prompt=f"{n} + 7 + 5 + 9 =", answer="19"), self.config.task) for n in range(64)]


class InProcess(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages, "tools": [TOOL]}
            async with HTTP[0].post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
                message = (await response.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return vf.ProgramResult(0, message["content"], "")
            for call in message["tool_calls"]:
                result = calculate(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})


HTTP = []
CALL = {"name": "calculate", "arguments": json.dumps({"a": 12, "op": "+", "b": 7})}


class Scripted(vf.Client):
    """A model in this process that answers at once: three tool calls, then a number."""

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None):
        number = sum(message["role"] == "tool" for message in body["messages"])
        message = {"role": "assistant", "content": "19"}
        if number < 3:
            call = {"id": f"call-{number}", "type": "function", "function": CALL}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if number < 3 else "stop"}
        usage = {"prompt_tokens": 60, "completion_tokens": 16, "total_tokens": 76}
        raw = {"id": "0", "object": "chat.completion", "created": 0, "model": "scripted"}
        raw |= {"choices": [choice], "usage": usage}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


async def rollouts(count, concurrent):
    agent = {"harness": {"id": "verifiers_rollouts"}, "runtime": {"type": "subprocess"}}
    config = vf.SingleAgentEnvConfig(taskset={"id": "verifiers_rollouts"}, agent=agent)
    env = vf.SingleAgentEnv(config)
    client = vf.EvalClientConfig(api_key_var="HOME")
    context = vf.ModelContext(model="scripted", client=client, sampling=vf.SamplingConfig())
    tasks, semaphore = list(env.taskset), asyncio.Semaphore(concurrent)
    async with aiohttp.ClientSession() as session, env.serving():
        HTTP[:] = [session]
        slots = [env.slots(tasks[n % len(tasks)])[0] for n in range(count)]
        return await asyncio.gather(*(env.run_slot(slot, context, semaphore) for slot in slots))


if __name__ == "__main__":
    import verifiers_rollouts

    server.resolve_client = lambda config: Scripted()
    count, concurrent = int(sys.argv[1]), int(sys.argv[2])
    asyncio.run(verifiers_rollouts.rollouts(64, concurrent))  # measured
    cpu, started = time.process_time(), time.perf_counter()  # measured
    episodes = asyncio.run(verifiers_rollouts.rollouts(count, concurrent))
    spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - started}  # measured
    rewards = [trace.reward for episode in episodes for trace in episode.traces]
    errors = [str(e) for episode in episodes for each in (episode, *episode.traces) for e in each.errors][:3]
    print(json.dumps({**spent, "ok": sum(e.ok for e in episodes), "reward": sum(rewards), "errors": errors}))
