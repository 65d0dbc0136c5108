"""Builds a tiny model that knows an environment's words and tools, from demonstrations.

Plays demonstrations (or reads conversations from a file), trains a tokenizer on their text and a small model on the
assistant's part, and stops once the model's reward comes close to theirs. Half of the played demonstrations
deliberately end too early: they show the format, and leave something to learn by reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.app.evaluation import evaluate
from agentrl.app.run_parts import task_source
from agentrl.config.run import RunConfig
from agentrl.core.errors import AgentRLError, CheckFailedError, EffectError, InputError, describe_user_code_error
from agentrl.core.ids import random_stream
from agentrl.core.records import Message, Task, ToolSpec
from agentrl.core.reply_formats import describe_malformed_call, parse_hermes
from agentrl.environment.context import EpisodeLimits
from agentrl.environment.demonstrations import DemonstratedReplies, format_reply, has_demonstrations
from agentrl.environment.environment import Environment
from agentrl.environment.registry import resolve
from agentrl.environment.tools import ToolEnvironment
from agentrl.environments.tiny_model.played_context import PlayedAgent, PlayedContext

if TYPE_CHECKING:
    from agentrl.environment.environment import Reply
    from agentrl.environments.tiny_model.model import Demonstration, Row
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

VOCABULARY = 1024
"""Maximum number of tokens of the tokenizer."""
CORPUS = 2000
"""Maximum number of demonstrations on whose text the tokenizer is trained."""
NUM_DEMONSTRATIONS = 50_000
"""Number of different demonstrations; further steps repeat them."""
SHORT_LIST = 2_000
"""Number of training tasks up to which a model that sees the same ones again and again memorizes them."""
NUM_EVAL_TASKS = 64
"""Number of held-out tasks that measure success."""
MEASURED_EVERY = 20
"""Number of warm-up steps between two measurements. After each, the model is in the directory that the user named."""
CHANGING = ("model.safetensors", "README.md", "train.toml")
"""Files of a model that change with each measurement."""
MAX_TURNS = 64
MAX_CONTEXT = 8192
"""Longest conversation to learn from, in tokens."""
MAX_ERRORS = 8
"""Largest number of failed calls for which a context has room."""
MAX_LINE_BYTES = 1 << 20

HOW = """\
write a good policy's replies, as a class method:

    @classmethod
    def demonstrate(cls, task, random):
        result = yield {{"name": "{tool}", "arguments": {{…}}}}   # a tool call; the environment's answer is sent back
        yield result                                             # text: here, the answer

or give conversations, a line of JSON each, {{"messages": [{{"role": …, "content": …}}, …]}}, by
--demonstrations FILE.jsonl"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelResult:
    """The result of a warm-up."""

    path: Path
    """Hugging Face directory of the model, with `train.toml` for the environment."""
    demonstrated: float | None
    """Mean reward of demonstrations on the measured tasks; None if they were read from a file."""
    before: float
    """Mean reward of the random weights on held-out tasks."""
    reward: float
    """Mean reward of the model on the same tasks."""
    steps: int
    parameters: int
    vocabulary: int
    goal: float | None
    """Held-out reward at which the warm-up ends; None without `demonstrated`."""
    explanation: str
    """Why the held-out reward did not rise, and what to change; empty if it rose, or if Ctrl-C left no time to find
    out."""
    interrupted: bool
    """Whether Ctrl-C ended the training."""


def build_tiny_model(
    environment: str | type,
    out: str | Path,
    *,
    demonstrations: str | Path | None = None,
    steps: int = 600,
    early: float = 0.5,
    until: float = 0.8,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda part: None,
) -> TinyModelResult:
    """Build a tiny model for an environment.

    Args:
        environment: a class, a registered name, `module:Class` or a path; `train.toml` needs one of the latter three.
        out: the directory to create.
        demonstrations: file of conversations as lines of JSON, which replaces the environment's `demonstrate`.
        steps: maximum number of supervised steps.
        early: share of the demonstrations with several tool calls that answer too early, with the result of an earlier
            call; the rest is left to learn by reward.
        until: share of the distance from the random weights' reward to the demonstrations' at which to stop.
        seed: seed of tasks, weights and all other random choices.
        on_progress: receives the name of each stage.

    Ctrl-C after the first step ends the training: the model is kept, then measured. A second one ends the measurement.
    Once a measurement has ended, `out` holds the model of its step, whatever ends this process.

    Raises:
        InputError: there are no demonstrations, or an argument is invalid.
        CheckFailedError: demonstrations fail in the environment, or earn no more than random weights.
        KeyboardInterrupt: Ctrl-C before the first step, or in the last measurement.
    """
    target = Path(out)
    if target.exists():
        raise InputError(f"{target} exists: give --out a new directory, or remove it")
    on_progress("loading the environment and its tasks")
    environment_class = resolve(environment)
    config = RunConfig.model_validate(
        {"environment": {"id": str(environment)}, "model": {"path": str(out)}, "seed": seed}
    )
    held_out = _held_out(config, environment_class)
    source = (
        _DemonstrationSource(config, environment_class, early)
        if demonstrations is None
        else _read(Path(demonstrations), environment_class)
    )
    memorized = "" if demonstrations is not None else fixed_list(config, environment_class)
    on_progress(memorized or "playing demonstrations")
    demonstration_reward = (
        None if demonstrations is not None else _demonstrated_reward(environment_class, held_out, seed, early)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        scratch.chmod(0o755)
        reference = (
            environment
            if isinstance(environment, str)
            else f"{environment_class.__module__}:{environment_class.__qualname__}"
        )
        builder = _Builder(
            config, environment_class, held_out, scratch, target, reference, seed, on_progress, memorized=memorized
        )
        outcome = builder.build(source, steps, until, demonstration_reward)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return TinyModelResult(path=target, **outcome)


# --- demonstrations ---------------------------------------------------------------------------------------------------


class _Expert:
    """Speaks the replies of `demonstrate` in the conversations of one agent: one, and one more from each restart on."""

    def __init__(
        self, environment: type[Environment], task: Task, seat: str, index: int, seed: int, calls: int | None
    ) -> None:
        self.conversations: list[list[Message]] = [[]]
        self._replies = DemonstratedReplies(environment, task, seat, index, seed)
        self._calls = calls
        """Number of calls after which it answers with the last tool result; None: when the demonstration does."""
        self.spoken: list[Reply] = []

    def restart(self) -> None:
        """Begin another conversation."""
        self.conversations.append([])

    async def __call__(self, new: Sequence[Message]) -> str:
        """Return the next reply, as the policy would write it."""
        self.conversations[-1] += new
        answer = "\n".join(message.content for message in new)
        reply: Reply = answer if len(self.spoken) == self._calls else self._replies.next(answer)
        self.spoken.append(reply)
        text = format_reply(reply)
        self.conversations[-1].append(Message(role="assistant", content=text))
        return text


class _ShownContext(PlayedContext):
    """An `EpisodeContext` that plays demonstrations and records each message with its speaker and tools."""

    _speakers: Mapping[str, Any]

    def __init__(self, environment: type[Environment], task: Task, seed: int, calls: int | None) -> None:
        limits = EpisodeLimits(max_turns=MAX_TURNS, max_tokens=MAX_CONTEXT, max_context=MAX_CONTEXT)
        super().__init__(task, {}, limits=limits, seed=seed, parse=parse_hermes)
        self.shown: list[tuple[_Expert, Sequence[ToolSpec]]] = []
        self._environment = environment
        self._seed = seed
        self._calls = calls

    def agent(self, seat: str, index: int = 0, *, tools: Sequence[ToolSpec] = ()) -> PlayedAgent:
        """Return the agent of a seat, which speaks the demonstration."""
        if (seat, index) in self.agents:
            return self.agents[seat, index]
        expert = _Expert(self._environment, self.task, seat, index, self._seed, self._calls)
        self.shown.append((expert, tools))
        self._speakers = {**self._speakers, seat: expert}
        new_agent = super().agent(seat, index, tools=tools)
        new_agent.on_restart = expert.restart
        return new_agent

    def demonstrations(self) -> list[Demonstration]:
        """Return the recorded conversations."""
        from agentrl.environments.tiny_model.model import Demonstration

        return [
            Demonstration(tuple(messages), tuple(tools))
            for expert, tools in self.shown
            for messages in expert.conversations
            if messages
        ]


def _shown(environment: type[Environment], task: Task, seed: int, early: float) -> tuple[list[Demonstration], float]:
    """Play one episode of a demonstration or, with probability `early`, of one that answers too early."""
    context = _play(environment, task, seed)
    random = random_stream("early", seed, task.id)
    if random.random() < early and len(context.shown) == 1:
        *calls, answer = context.shown[0][0].spoken
        if len(calls) > 1 and isinstance(answer, str) and not any(isinstance(call, str) for call in calls):
            context = _play(environment, task, seed, calls=random.randrange(1, len(calls)))
    return context.demonstrations(), float(sum(sum(agent.rewards) for agent in context.agents.values()))


def _play(environment: type[Environment], task: Task, seed: int, *, calls: int | None = None) -> _ShownContext:
    """Play an episode of demonstrations; with `calls`, one that answers after this number of calls."""
    context = _ShownContext(environment, task, seed, calls)
    try:
        asyncio.run(environment().run(context))
    except EffectError as error:
        raise _demonstration_error(task, error.__cause__ or error) from error
    except AgentRLError:
        raise
    except Exception as error:
        raise _demonstration_error(task, error) from error
    return context


def _demonstration_error(task: Task, error: BaseException) -> CheckFailedError:
    return CheckFailedError(f"the demonstration of task {task.id!r} raised {describe_user_code_error(error)}")


class _DemonstrationSource:
    """The environment's demonstrations on its training tasks, task after task.

    Each pass uses the tasks of another seed: if tasks are drawn, a model that sees each task once learns to copy, while
    one that sees the same tasks repeatedly memorizes them.
    """

    def __init__(self, config: RunConfig, environment: type[Environment], early: float) -> None:
        if not has_demonstrations(environment):
            tools = list(environment.tool_table()) if issubclass(environment, ToolEnvironment) else []
            name = tools[0] if tools else "my_tool"
            raise InputError(f"{environment.__name__} has no demonstrations to learn from: {HOW.format(tool=name)}")
        environment.load()
        self._environment = environment
        self._config = config
        self._early = early

    def __iter__(self) -> Iterator[Demonstration]:
        num_played = 0
        for seed in count(self._config.seed):
            tasks = task_source(self._config.environment, seed, self._environment, "train")
            if not len(tasks):
                raise InputError(
                    f"{self._environment.__name__}.tasks('train') is empty, so there is nothing to demonstrate"
                )
            for number in range(len(tasks)):
                yield from _shown(self._environment, tasks[number], seed, self._early)[0]
                num_played += 1
                if num_played == NUM_DEMONSTRATIONS:
                    return


def _demonstrated_reward(environment: type[Environment], tasks: Sequence[Task], seed: int, early: float) -> float:
    """Return the mean reward of demonstrations."""
    return sum(_shown(environment, task, seed, early)[1] for task in tasks) / len(tasks)


def _read(path: Path, environment: type[Environment]) -> list[Demonstration]:
    """Read conversations from a file, one line of JSON each.

    Raises:
        InputError: the file has none, or a line is not a conversation.
    """
    from agentrl.environments.tiny_model.model import Demonstration

    table = environment.tool_table() if issubclass(environment, ToolEnvironment) else {}
    tools = tuple(bound.spec for bound in table.values())
    demonstrations_read: list[Demonstration] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), ""), start=1):
                if line.strip():
                    try:
                        demonstrations_read.append(Demonstration(_messages(json.loads(line)), tools))
                    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                        raise InputError(
                            f"{path}:{number}: not a conversation ({type(error).__name__}: {str(error)[:200]}); a line "
                            "is "
                            '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}, …]}'
                        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    if not demonstrations_read:
        raise InputError(f"{path}: contains no conversation")
    return demonstrations_read


def _messages(line: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = [_message(message) for message in line["messages"]]
    roles = [message.role for message in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise ValueError(
            "it must begin with a message that is not the assistant's, and contain an assistant message after it"
        )
    return tuple(messages[: len(roles) - roles[::-1].index("assistant")])


def _message(message: Mapping[str, Any]) -> Message:
    content, role = message.get("content") or "", message["role"]
    if not isinstance(content, str) or role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"a message has role {role!r} and content of {type(content).__name__}")
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        parsed_arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({"name": call["function"]["name"], "arguments": parsed_arguments})
    return Message(role=role, content=content + (format_reply(calls) if calls else ""))


def _failed_demonstration(corpus: Sequence[Demonstration]) -> str:
    """Return the messages of the first demonstration in which a tool fails or, if none does, of the first one."""

    def fails(demonstration: Demonstration) -> bool:
        return any(each.role == "tool" and each.content.startswith("error:") for each in demonstration.messages)

    failed = next(filter(fails, corpus), corpus[0])
    return "\n".join(f"  {message.role}: {' '.join(message.content.split())[:300]}" for message in failed.messages)


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sizes:
    """Maximum sizes of the demonstrations, in tokens and turns."""

    context: int = 0
    turn: int = 0
    turns: int = 0
    error: int = 0
    """Tokens that a failed call adds; demonstrations have none."""

    def see(self, row: Row) -> None:
        mask = [0, *row[1], 0]
        starts = [at for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]
        ends = [at for at in range(1, len(mask)) if not mask[at] and mask[at - 1]]
        self.context = max(self.context, len(row[0]))
        self.turn = max(self.turn, *(end - start for start, end in zip(starts, ends, strict=True)))
        self.turns = max(self.turns, len(starts))

    @property
    def max_tokens(self) -> int:
        """Length of the longest turn, and half as much again."""
        return -(-self.turn * 3 // 2 // 8) * 8 + 8

    @property
    def max_turns(self) -> int:
        return self.turns + 2

    @property
    def max_context(self) -> int:
        errors = min(self.max_turns, MAX_ERRORS) * self.error
        return -(-(self.context + 2 * self.max_tokens + errors) // 64) * 64


@dataclass(slots=True)
class _Progress:
    """The course of the training."""

    max_steps: int
    reward: float
    """Held-out reward of the newest measurement; at first that of the random weights."""
    goal: float | None
    step: int = 0
    loss: float = 0.0
    measured_at: int = 0
    """Step of the newest measurement."""
    reached_at: int | None = None
    """Step of the first measurement that reached the goal."""

    def record(self, reward: float) -> None:
        """Record a measurement of the current step."""
        self.reward, self.measured_at = reward, self.step
        if self.reached_at is None and self.goal is not None and reward >= self.goal:
            self.reached_at = self.step

    @property
    def line(self) -> str:
        """The step, and what is known of the model, for people."""
        from agentrl.environments.tiny_model.model import COOL_DOWN

        end = f"at most {self.max_steps}"
        if self.reached_at is not None:
            end = str(max(min(self.reached_at + COOL_DOWN, self.max_steps - 1), self.step))
        text = f"step {self.step} of {end}, loss {self.loss:.3f}, held-out reward {self.reward:.2f}"
        text += f" at step {self.measured_at}" if self.measured_at else " before training"
        if self.reached_at is not None:
            return f"{text}; the goal {self.goal:.2f} was reached at step {self.reached_at}"
        return text if self.goal is None else f"{text}, goal {self.goal:.2f}"


@dataclass(slots=True)
class _Builder:
    """Builds the model in a directory, and keeps measured ones in the user's."""

    config: RunConfig
    environment: type[Environment]
    held_out: Sequence[Task]
    directory: Path
    target: Path
    reference: str
    """The environment in `train.toml`."""
    seed: int
    on_progress: Callable[[str], None]
    sizes: _Sizes = field(default_factory=_Sizes)
    has_kept: bool = False
    memorized: str = ""
    """Result of `fixed_list`."""

    def build(
        self, source: _DemonstrationSource | list[Demonstration], steps: int, until: float, target: float | None
    ) -> dict[str, Any]:
        """Write the model; returns facts to report about it."""
        from agentrl.environments.tiny_model import model as tiny_model

        tiny_model.seed_torch(self.seed)
        directory = self.directory
        corpus = [demonstration for _, demonstration in zip(range(CORPUS), source, strict=False)]
        chat, vocabulary = self._make_tokenizer(corpus)
        stop = chat.stop_token_ids[0]
        model = tiny_model.random_model(
            vocabulary=vocabulary,
            pad_token=chat.encode("<|pad|>")[0],
            stop_token=stop,
            context=max(2 * self.sizes.max_context, 512),
            hidden=128,
            layers=4,
        )
        tiny_model.save_model(model, directory, stop_tokens=stop)
        before = self._measure("random weights")
        if target is not None and target <= before:
            raise CheckFailedError(
                f"the demonstrations earn {target:.3f}, random weights {before:.3f}: check `demonstrate` and `reward`. "
                f"One that earns little:\n{_failed_demonstration(corpus)}"
            )
        goal = None if target is None else before + until * (target - before)
        progress = _Progress(steps, before, goal if goal is not None and goal > before else None)

        def keep(explanation: str = "") -> dict[str, Any]:
            outcome = {
                "explanation": explanation,
                "demonstrated": target,
                "goal": goal,
                "before": before,
                "reward": progress.reward,
                "steps": progress.step,
                "interrupted": interrupted,
                "parameters": model.num_parameters(),
                "vocabulary": vocabulary,
            }
            _write_notes(self.directory, self.target, self.reference, self.sizes, outcome)
            self._keep()
            return outcome

        def on_step(step: int, loss: float) -> bool:
            progress.step, progress.loss = step, loss
            self.on_progress(progress.line)
            if step % MEASURED_EVERY:
                return False
            tiny_model.save_model(model, directory, stop_tokens=stop)
            progress.record(self._measure(progress.line))
            keep()
            return progress.reached_at is not None

        rows, interrupted = _again_and_again(chat, source, self.seed), False
        try:
            tiny_model.train_supervised(model, rows, steps=steps, on_step=on_step)
        except KeyboardInterrupt:
            if progress.step == 0:
                raise
            interrupted = True
        tiny_model.save_model(model, directory, stop_tokens=stop)
        keep()  # before the last measurement: there may be no time for it
        progress.record(self._measure(f"step {progress.step}, the last"))
        return keep(self._explain(before, progress.reward, target, interrupted=interrupted))

    def _make_tokenizer(self, corpus: Sequence[Demonstration]) -> tuple[TemplateChatFormat, int]:
        """Write the tokenizer of a corpus with its chat template, and measure the corpus with it.

        Returns:
            The chat format, and the number of tokens in the vocabulary.

        Raises:
            InputError: a demonstration is too long.
        """
        from agentrl.environments.tiny_model import model as tiny_model
        from agentrl.rollout.chat.chat_format import TemplateChatFormat
        from agentrl.rollout.chat.chat_template import ChatTemplate

        directory = self.directory
        tiny_model.write_chat_template(
            directory, tiny_model.TEMPLATE, pad="<|pad|>", end="<|im_end|>", context=MAX_CONTEXT
        )
        texts = tiny_model.format_corpus(ChatTemplate(directory), iter(corpus))
        tokenizer = tiny_model.train_tokenizer(
            texts, vocabulary=VOCABULARY, min_frequency=min(15, max(2, len(corpus) // 100))
        )
        tiny_model.write_tokenizer(directory, tokenizer, special=tiny_model.SPECIAL, markup=tiny_model.MARKUP)
        chat = TemplateChatFormat.load(directory)
        for demonstration in corpus:
            self.sizes.see(tiny_model.tokenise_demonstration(chat, demonstration))
        tools = max((demonstration.tools for demonstration in corpus), key=len)
        if tools:
            self.sizes.error = max(len(chat.extend([each], after="stop")) for each in _error_messages(tools))
        if self.sizes.context > MAX_CONTEXT:
            raise InputError(
                f"a demonstration has {self.sizes.context} tokens, too long for a tiny model (at most {MAX_CONTEXT}): "
                "use a real model, `agentrl train … --model DIR`"
            )
        return chat, tokenizer.get_vocab_size()

    def _keep(self) -> None:
        """Put a copy of the model in the user's directory, whole at any moment.

        Raises:
            InputError: another program has made the directory since the start.
        """
        directory, target = self.directory, self.target
        if not (self.has_kept and target.exists()):
            staging = directory.with_name(f"{directory.name}-whole")
            try:
                shutil.copytree(directory, staging)
                staging.rename(target)
            except OSError as error:
                if not target.exists():
                    raise
                raise InputError(
                    f"{target} did not exist when the warm-up began, and another program has made it since: give "
                    "--out another directory"
                ) from error
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            self.has_kept = True
            return
        for name in CHANGING:
            partial = target / f".{name}"
            try:
                shutil.copy(directory / name, partial)
                os.replace(partial, target / name)
            finally:
                partial.unlink(missing_ok=True)

    def _explain(self, before: float, reward: float, demonstration_reward: float | None, *, interrupted: bool) -> str:
        """Explain a held-out reward that did not rise, with the reward on training tasks; empty if it rose."""
        if has_risen(before, reward, demonstration_reward):
            return ""
        if interrupted:  # there is no time to measure more
            return self.memorized
        tasks = task_source(self.config.environment, self.config.seed, self.environment, "train")
        training_tasks = [tasks[number] for number in range(min(NUM_EVAL_TASKS, len(tasks)))]
        return explain_flat_reward(
            before,
            reward,
            demonstration_reward,
            on_training_tasks=self._measure("training tasks", training_tasks),
            tasks=len(tasks),
        )

    def _measure(self, part: str, tasks: Sequence[Task] = ()) -> float:
        """Return the mean reward of the model on disk on held-out or given tasks, sampled as in training."""
        tasks = tasks or self.held_out
        self.on_progress(f"{part}: playing {len(tasks)} tasks")
        sizes = self.sizes
        config = RunConfig.model_validate(
            {
                "environment": self.config.environment.model_dump(),
                "seed": self.seed,
                "model": {"path": str(self.directory)},
                "sampling": {"max_tokens": sizes.max_tokens, "max_turns": sizes.max_turns},
                "engine": {"slots": NUM_EVAL_TASKS, "max_context": sizes.max_context},
            }
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what the warm-up is about to teach
            return evaluate(config, tasks=tasks, environment=self.environment)["evaluation/reward"]


def _error_messages(tools: Sequence[ToolSpec]) -> Sequence[Message]:
    """Return observations of wrong calls, for their lengths."""
    unknown = f"no tool 'x'; tools: {', '.join(tool.name for tool in tools)}"
    return [Message(role="tool", content=f"error: {text}") for text in (unknown, describe_malformed_call("{"))]


def fixed_list(config: RunConfig, environment: type[Environment]) -> str:
    """Say that the training tasks are a short list that every seed repeats; empty if they are not."""
    sources = [task_source(config.environment, config.seed + number, environment, "train") for number in range(2)]
    num_tasks = len(sources[0])
    if max(map(len, sources)) > SHORT_LIST:
        return ""
    first, second = (
        sorted(json.dumps(dict(tasks[at].data), sort_keys=True) for at in range(num_tasks)) for tasks in sources
    )
    if first != second:
        return ""
    return (
        f"every seed has the same training tasks ({num_tasks}), and the model memorizes so short a list. Draw more of "
        "them from `seed`, and hold out other combinations of the same words"
    )


def has_risen(before: float, reward: float, demonstration_reward: float | None) -> bool:
    """Whether a reward has risen by a fifth of the way to that of the demonstrations, or at all if that is unknown."""
    way = 0.0 if demonstration_reward is None else demonstration_reward - before
    return reward > before + way / 5


def explain_flat_reward(
    before: float, reward: float, demonstration_reward: float | None, *, on_training_tasks: float, tasks: int
) -> str:
    """Explain why a held-out reward did not rise.

    Args:
        before: held-out reward of the random weights.
        reward: held-out reward of the model.
        demonstration_reward: reward of the demonstrations, if known; more than `before`.
        on_training_tasks: reward of the model on the tasks whose demonstrations it learned.
        tasks: number of training tasks of one seed.
    """
    if has_risen(before, on_training_tasks, demonstration_reward):
        return (
            f"on training tasks it earns {on_training_tasks:.3f}, so it memorized them: there are {tasks}, or held-out "
            "tasks contain words that no training task contains. Draw more training tasks from `seed`, and hold out "
            "other combinations of the same words"
        )
    return (
        f"on training tasks it earns {on_training_tasks:.3f}, so it has not learned the demonstrations: raise --steps, "
        "shorten the messages, or make the replies follow from the messages alone"
    )


def _again_and_again(chat: Any, source: _DemonstrationSource | list[Demonstration], seed: int) -> Iterator[Row]:
    """Yield the rows of all demonstrations in order, then repeatedly, each time in a new order."""
    from agentrl.environments.tiny_model.model import tokenise_demonstration

    rows: list[Row] = []
    for demonstration in source:
        rows.append(tokenise_demonstration(chat, demonstration))
        yield rows[-1]
    for number in count():
        order = list(range(len(rows)))
        random_stream("warm-up", seed, number).shuffle(order)
        for index in order:
            yield rows[index]


def _held_out(config: RunConfig, environment: type[Environment]) -> list[Task]:
    """Return the tasks that measure success: drawn from the held-out ones, or from training tasks if there are none."""
    for split in ("held_out", "train"):
        source = task_source(config.environment, config.seed, environment, split)
        if len(source):
            drawn = random_stream("measured", config.seed).sample(range(len(source)), min(NUM_EVAL_TASKS, len(source)))
            return [source[index] for index in drawn]
    raise InputError(f"{environment.__name__}.tasks('train') is empty, so there is nothing to demonstrate")


# --- what is left beside it -------------------------------------------------------------------------------------------

README = """\
# A tiny model for {environment}

{parameters:,} parameters (Qwen3 architecture), a byte-level tokenizer of {vocabulary} tokens, a chat template with
tools. `python -m agentrl.environments.tiny_model` trained it from random weights on demonstrations, in {steps} steps.
It knows the words and tools of that environment and nothing else.

Held-out reward: {before:.2f} before, {reward:.2f} after{demonstrated}.

```
{command}
```

continues its training by reward. Other configurations accept it as `--model {path}`, and
`AutoModelForCausalLM.from_pretrained` loads it.
"""
TRAIN = """\
# {command}
# Trains the warmed-up model in this directory by reward. Every field: docs/reference/configuration.md.
name = {name}
steps = 40            # optimizer steps

[environment]
id = {reference}

[model]
path = "."            # this directory

[policies.policy]
learning_rate = 3e-4
step_size = 64        # episodes per optimizer step

[credit]
group_size = 8        # episodes of one task, compared with each other

[sampling]
max_tokens = {max_tokens}       # longest turn; demonstrated: {turn}
max_turns = {max_turns}         # demonstrated: {turns}

[engine]
slots = 96
max_context = {max_context}     # longest conversation; demonstrated: {context}, without errors of tools

[trainer]
loss.normalizer = 64  # sampled tokens of a typical episode

[evaluation]
tasks = 256           # held-out tasks, before the first step and after the last

[best]
metric = "reward/mean"  # the version with the best mean of 5 steps is kept, in case the reward falls later
"""


def _write_notes(scratch: Path, target: Path, reference: str, sizes: _Sizes, outcome: Mapping[str, Any]) -> None:
    location, colon, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if location.endswith(".py"):
        reference = os.path.relpath(location, target) + colon + name
    command = f"agentrl train {shlex.quote(str(target / 'train.toml'))}"
    values = {
        **outcome,
        "command": command,
        "environment": name or location,
        "reference": json.dumps(reference),
        "name": json.dumps(target.name if target.name.replace("-", "").replace("_", "").isalnum() else "warmed_up"),
        "path": target,
        "context": sizes.context,
        "turn": sizes.turn,
        "turns": sizes.turns,
        "max_tokens": sizes.max_tokens,
        "max_turns": sizes.max_turns,
        "max_context": sizes.max_context,
    }
    demonstration_reward = outcome["demonstrated"]
    values["demonstrated"] = (
        "" if demonstration_reward is None else f" (the demonstrations: {demonstration_reward:.2f})"
    )
    (scratch / "README.md").write_text(README.format(**values), encoding="utf-8")
    (scratch / "train.toml").write_text(TRAIN.format(**values), encoding="utf-8")
