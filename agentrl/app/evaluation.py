"""`evaluate`: plays policies on held-out tasks, with the runner and engine of training, without training.

`play_without_training` plays the episodes; `forks` uses it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import ValidationError

from agentrl.app.assemble import make_local_worker
from agentrl.app.engines import check_endpoints, make_engine
from agentrl.app.hub import check_local_models, is_hub_name, with_downloaded_models
from agentrl.app.memory_estimate import check_gpu_memory, memory_line
from agentrl.app.model_files import model_paths
from agentrl.app.plan import with_chosen_settings
from agentrl.app.policies import (
    check_tokenizers,
    frozen_policy_weights,
    hidden_tools,
    serve_configured_weights,
    weights_from_directory,
)
from agentrl.app.received import remember_run, selected_by_tasks
from agentrl.app.run_parts import (
    check_packages_of_run,
    check_programs,
    check_prompts,
    environment_of,
    first_prompts,
    held_out_task_splits,
    importable_environment_code,
    load_config,
    make_chat_format,
    task_source,
    unproved_sandbox_promises,
)
from agentrl.app.run_tasks import TRAIN, RunTasks
from agentrl.cluster.session import gpu_reservation
from agentrl.config.plans import RolloutPlan
from agentrl.config.policies import (
    AnyPolicy,
    FrozenPolicy,
    LocalPolicy,
    PolicyConfig,
    RemotePolicy,
)
from agentrl.config.run import RunConfig
from agentrl.config.sections import EnvironmentConfig
from agentrl.core import event_loop
from agentrl.core.clock import SystemClock
from agentrl.core.errors import CheckFailedError, EngineLostError, InputError, RunDirectoryError
from agentrl.core.files import expand_path, temporary_directory
from agentrl.core.intervals import Interval, difference_interval, verdict
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.records import EpisodeHeader, PolicyVersion, Task, WeightsRef
from agentrl.core.text import plural
from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.credit.release import WholeGroupRelease
from agentrl.engines.remote_policy import RemotePolicyClient
from agentrl.environment.environment import Environment, TaskSource
from agentrl.inspection.conversation import PolicyTurn, read_conversation
from agentrl.inspection.reader import RunReader
from agentrl.journal.port import MetricRow
from agentrl.journal.run_process import record_process_state, recording_process_state
from agentrl.observe.alarms import (
    Alarm,
    always_fails_alarms,
    cut_off_alarm,
    equal_rewards_alarm,
    fill_commands,
    foreign_calls_alarm,
    hidden_tools_alarm,
)
from agentrl.observe.blocked_loop import watch_event_loop
from agentrl.observe.bottleneck import FailingCalls, failing_calls
from agentrl.observe.metrics import TASK_DIGEST, metrics_owner, with_unset_metrics
from agentrl.observe.run_directory import run_argument
from agentrl.observe.run_state import (
    MetricsFile,
    RunDisplaySettings,
    RunSnapshot,
    display_settings_from_config,
    write_run_snapshot,
)
from agentrl.orchestrator.admission_limit import first_limit
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.dispatch import ChangeCondition, make_dispatcher
from agentrl.orchestrator.evaluation import (
    HeldOutSplit,
    evaluation_metrics,
    held_out_digest,
)
from agentrl.orchestrator.host import DispatchingHost
from agentrl.orchestrator.versions import ServedVersions

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, Engine
    from agentrl.journal.port import JournalStore
    from agentrl.orchestrator.dispatch import Dispatcher

T = TypeVar("T")
Directory = str | Path
Play = Callable[["Dispatcher"], Coroutine[Any, Any, list[EpisodeHeader]]]
"""Plays episodes with a dispatcher, and returns their headers."""

ENDPOINT_TIMEOUT_S = 600.0
"""Time limit of a request to an evaluated endpoint, in seconds: models that think take minutes."""
SHOWN_MODELS = 20
PROGRESS_S = 0.5
"""Seconds between two reports of the progress of an evaluation or of forks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEpisode:
    """The result of one episode of an evaluation."""

    id: str
    parent_id: str | None
    """Id of the parent, for a child episode."""
    task: Any = field(repr=False)
    """Data of the task."""
    task_id: str
    reward: float | None
    """Sum of the rewards over the episode's agents, of which `evaluation/reward` is the mean."""
    rewards: Mapping[str, float]
    """Mean reward of each rewarded seat's agents."""
    stop_reason: str | None
    detail: str
    """Why the episode was dropped; empty if it was not."""
    turns: int
    tokens: int
    """Number of sampled tokens; for a remote policy the endpoint's count, or else the bytes of its lines."""
    metrics: Mapping[str, float]
    """Values of `ctx.metric`, and agentrl's own counts."""
    conversations: Mapping[str, list[dict[str, Any]]] = field(repr=False)
    """Messages of each agent, keyed by its name, such as `solver`, or `solver[1]` for the seat's second agent; the
    assistant's are as the environment read them."""

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Messages of the agent that acted first."""
        return next(iter(self.conversations.values()), [])


class Evaluation(dict[str, float]):
    """The metrics of an evaluation by name, and its episodes.

    Args:
        metrics: the metrics.
        episodes: the episodes.
    """

    def __init__(
        self,
        metrics: Mapping[str, float],
        episodes: Sequence[EvaluatedEpisode],
    ) -> None:
        super().__init__(metrics)
        self.episodes = list(episodes)
        """Results in the order in which the tasks were played, each before its children."""

    def compared_with(self, other: Evaluation) -> dict[str, float]:
        """Return this evaluation minus another one, task by task, over the tasks of both.

        Both used the same seeds for each task, so the difficulty of a task cancels in its difference, and the interval
        is narrower than the intervals of the two means.

        Returns:
            `difference/reward`, with the ends `difference/reward_low` and `difference/reward_high` of its 95 % interval
            (`core.intervals`); `difference/better`, `difference/worse` and `difference/tasks`, the numbers of tasks.

        Raises:
            InputError: the evaluations have no task in common.
        """
        rewards, other_rewards = self.rewards_by_task(), other.rewards_by_task()
        both = [task for task in rewards if task in other_rewards]
        if not both:
            raise InputError("the two evaluations used different tasks, so their scores cannot be paired")
        differences = [rewards[task] - other_rewards[task] for task in both]
        interval = difference_interval([(rewards[task], other_rewards[task]) for task in both])
        return {
            "difference/reward": statistics.mean(differences),
            "difference/reward_low": interval.low,
            "difference/reward_high": interval.high,
            "difference/better": float(sum(difference > 0 for difference in differences)),
            "difference/worse": float(sum(difference < 0 for difference in differences)),
            "difference/tasks": float(len(differences)),
        }

    @staticmethod
    def verdict(differences: Mapping[str, float]) -> str:
        """Return what the result of `compared_with` shows: `better`, `worse` or `undecided`."""
        return verdict(Interval(differences["difference/reward_low"], differences["difference/reward_high"]))

    def rewards_by_task(self) -> dict[bytes, float]:
        """Return the mean reward of the root episodes, by the id and data of their task as JSON."""
        roots = [episode for episode in self.episodes if episode.parent_id is None]
        return _means_by_task((_task_key(each.task_id, each.task), each.reward or 0.0) for each in roots)


def _task_key(task_id: str, data: Any) -> bytes:
    """Identify a task: tasks of different splits may have equal ids. The id of another environment's task names it."""
    return msgspec.json.encode([task_id, data], order="deterministic")


def _means_by_task(rewards: Iterable[tuple[bytes, float]]) -> dict[bytes, float]:
    values_by_task: dict[bytes, list[float]] = {}
    for task, reward in rewards:
        values_by_task.setdefault(task, []).append(reward)
    return {task: statistics.mean(values) for task, values in values_by_task.items()}


@outside_event_loop
def evaluate(
    config: RunConfig | str | Path,
    policy: Directory | Mapping[str, Directory] | None = None,
    tasks: Sequence[Task] | int | None = None,
    *,
    environment: type | None = None,
    journal: str | Path | None = None,
    on_progress: Callable[[int, int], None] = lambda ended, episodes: None,
    on_phase: Callable[[str, str], None] = lambda phase, part: None,
) -> Evaluation:
    """Measure the mean reward on held-out tasks, each sampled `evaluation.attempts` times as in training, without
    training.

    Args:
        config: a configuration, or the path of a TOML file.
        policy: directories of trained weights by policy, such as `run.policies`, or one for the only trained policy:
            full weights of the base model's architecture, or an adapter. The other policies are the base model.
        tasks: tasks that replace the environment's `held_out` split, or their number, as `evaluation.tasks`.
        environment: a class that replaces `config.environment.id`.
        journal: a new directory that keeps the episodes for inspection; default: they are not kept.
        on_progress: receives the number of ended episodes, and of all, about twice a second.
        on_phase: receives each phase of the start when it begins, and while it lasts again with the part that runs,
            about twice a second; "" for the whole.

    Returns:
        Metrics by name, such as `evaluation/reward`, and as `.episodes` every episode: its conversations, reward and
        stop reason.

    Raises:
        InputError: an argument cannot be used, or a GPU is too small or too full.
        CheckFailedError: an episode was dropped.
    """
    temporary_directory()  # many libraries need one
    config = load_config(config)
    config, tasks = _with_tasks(config, tasks)
    trained, plan = config.trained, display_settings_from_config(config.model_dump(mode="json"))
    check_packages_of_run(config, environment)
    environment_class = environment_of(config, environment)
    check_programs(config, environment_class)
    config, weights = prepare_evaluation(config, policy, on_phase)
    asyncio.run(unproved_sandbox_promises(config.sandbox, environment_class))
    splits = (
        [HeldOutSplit("held_out", tasks)]
        if tasks is not None
        else held_out_task_splits(config.evaluation, config.environment, config.seed, environment_class)[0]
    )
    if not any(split.tasks for split in splits):
        raise InputError("evaluation.tasks is 0, so there are no tasks to evaluate on; set it to 1 or more")
    chat_format = make_chat_format(config.model)
    for line in _check_tasks(config, environment_class, chat_format, splits, are_given=tasks is not None):
        warnings.warn(line, stacklevel=1)
    with tempfile.TemporaryDirectory(prefix="agentrl-evaluate-") as scratch:
        run_path = Path(expand_path(scratch if journal is None else journal)).absolute()
        if (run_path / "journal").exists():
            raise RunDirectoryError(f"{run_path} already contains a journal; give evaluate a new directory")
        selected = selected_by_tasks(environment_class, [split.tasks for split in splits])
        code = importable_environment_code(environment_class)
        for line in () if journal is None else remember_run(run_path, config, code, selected):
            warnings.warn(line, stacklevel=1)
        attempts = config.evaluation.attempts
        failing = dict[str, FailingCalls]()
        play = _player(
            [task for split in splits for task in split.tasks for _ in range(attempts)], on_progress, failing
        )
        headers = event_loop.run(
            play_in_new_run(config, environment_class, chat_format, weights, run_path, play, on_phase)
        )
        episodes, environments = _episodes(run_path)
    metrics_by_episode = with_unset_metrics({episode.id: episode.metrics for episode in episodes}, environments, {})
    dropped_headers = [header for header in headers if not header.committed]
    if dropped_headers:
        reason = next((episode.detail for episode in episodes if episode.id == dropped_headers[0].episode_id), "")
        first = dropped_headers[0]
        show = f"; `agentrl episode show {run_argument(run_path)} {first.episode_id}` shows it" if journal else ""
        raise CheckFailedError(
            f"dropped: {len(dropped_headers)} of {plural(len(headers), 'episode')}, so a score over the others would "
            f"be biased. {first.episode_id} was dropped because of {first.drop_reason}: {reason}{show}"
        )
    if journal is not None:
        owners = {
            header.episode_id: metrics_owner(trained, acted) or metrics_owner(config.policies, acted)
            for header in headers
            if (acted := {trajectory.policy for trajectory in header.trajectories})
        }
        metrics_by_policy = {
            name: evaluation_metrics(
                *(headers, name, attempts, splits),
                {episode: values for episode, values in metrics_by_episode.items() if owners.get(episode) == name},
            )
            | {TASK_DIGEST: float(held_out_digest(splits))}
            for name in config.policies
        }
        asyncio.run(_record_metrics(run_path, metrics_by_policy, failing))
    metrics = evaluation_metrics(headers, None, attempts, splits, metrics_by_episode)
    alarms = _evaluation_alarms(metrics, plan, [*trained], failing)
    _warn_of(alarms, None if journal is None else run_path, metrics_by_episode)
    return Evaluation(metrics, episodes)


def _evaluation_alarms(
    metrics: Mapping[str, float],
    plan: RunDisplaySettings,
    trained: Sequence[str],
    failing: Mapping[str, FailingCalls],
) -> list[Alarm]:
    """Return the alarms about calls that always fail, and replies that are cut off or hold calls that are not read.
    Without any of these, return the alarm about rewards that are all 0."""
    policy = trained[0] if len(trained) == 1 else ""
    found = [hidden_tools_alarm(metrics, policy) or cut_off_alarm(metrics, policy, plan)]
    found.insert(0, foreign_calls_alarm(metrics, policy, held_out=True))
    alarms = [*always_fails_alarms(failing, plan, policy, is_over=True), *filter(None, found)]
    if not alarms and metrics.get("evaluation/reward") == 0.0:  # the same reward above 0 may be a success
        alarms += filter(None, [equal_rewards_alarm(metrics, policy)])
    return alarms


def _warn_of(
    alarms: Iterable[Alarm], run: Path | None, metrics_by_episode: Mapping[str, Mapping[str, float | None]]
) -> None:
    """Warn of alarms of an evaluation; their commands name an episode of its run, if that is kept."""
    for alarm in alarms:
        with_metric = (episode for episode, values in metrics_by_episode.items() if values.get(alarm.example))
        name, example = ("RUN", "") if run is None else (run_argument(run), next(with_metric, ""))
        line = alarm._replace(policy="", advice=fill_commands(alarm.advice, name, example)).line
        warnings.warn(line, stacklevel=2)


def _player(tasks: Sequence[Task], on_progress: Callable[[int, int], None], failing: dict[str, FailingCalls]) -> Play:
    """Return the function that plays the tasks, and adds calls that always fail to `failing`."""

    async def play(dispatcher: Dispatcher) -> list[EpisodeHeader]:
        def report() -> None:
            on_progress(dispatcher.evaluated.progress()[0], len(tasks))

        headers = await reporting(dispatcher.evaluate(tasks, {}), report)
        failing.update(failing_calls(dispatcher.worker.activity()))
        return headers

    return play


def _with_tasks(config: RunConfig, tasks: Sequence[Task] | int | None) -> tuple[RunConfig, Sequence[Task] | None]:
    """Put a number of tasks into the configuration; check a list of tasks."""
    if isinstance(tasks, int):
        if tasks < 1:
            raise InputError(f"tasks = {tasks}: expected a list of tasks, or their number, at least 1")
        section = config.evaluation.model_copy(update={"tasks": tasks})
        return config.model_copy(update={"evaluation": section}), None
    for task in tasks or ():
        if not isinstance(task, Task):
            raise InputError(f"tasks has {type(task).__name__} {task!r:.80}: expected agentrl.Task objects")
    return config, tasks


def _training_tasks(section: EnvironmentConfig, seed: int, environment: type[Environment]) -> TaskSource | None:
    """Return the training tasks, with which the held-out ones are compared; None if there are none to compare."""
    with contextlib.suppress(InputError):
        return task_source(section, seed, environment, TRAIN)
    return None


async def _record_metrics(
    run: Path, metrics_by_policy: Mapping[str, Mapping[str, float]], failing: Mapping[str, FailingCalls]
) -> None:
    """Add the metrics of each policy to the run's journal and to its file of metrics, and failing calls to its status,
    from which `agentrl run view` shows their alarms."""
    from agentrl.journal.store import SqliteJournal

    store = SqliteJournal(run / "journal")
    with contextlib.closing(MetricsFile(run / "metrics.jsonl")) as file:
        for policy, metrics in metrics_by_policy.items():
            store.record(MetricRow(policy, 0, metrics))
            file.record(policy, 0, metrics)
    write_run_snapshot(run, RunSnapshot(phase="", failing=failing))
    await store.close()


def find_remote_policy(address: str, api_key_env: str) -> RemotePolicy:
    """Return the policy behind the endpoint at `URL[,NAME]`, after asking the endpoint for its models.

    Raises:
        InputError: the endpoint cannot be reached, or has several models and none is named.
    """
    url, _, name = address.partition(",")
    try:
        policy = RemotePolicy(kind="remote", url=url, model=name, api_key_env=api_key_env, timeout_s=ENDPOINT_TIMEOUT_S)
    except ValidationError as error:
        raise InputError(f"--model {url}: {error.errors(include_url=False)[0]['msg']}") from None
    models = asyncio.run(_models(policy))
    if name or len(models) == 1:
        return policy.model_copy(update={"model": name or models[0]})
    has = f"it has {', '.join(models[:SHOWN_MODELS])}" if models else "it lists none"
    raise InputError(f"{url}: no model is named; write --model {url},NAME; {has}")


async def _models(policy: RemotePolicy) -> list[str]:
    endpoint = RemotePolicyClient(policy="model", config=policy)
    try:
        return await endpoint.models()
    except EngineLostError as error:
        raise InputError(f"the endpoint is unreachable: {error}") from None
    finally:
        await endpoint.close()


def _episodes(journal: Path) -> tuple[list[EvaluatedEpisode], dict[str, str]]:
    """Return the episodes in the journal of an evaluation, each in its last attempt, and their environments by id."""
    reader = RunReader(journal)
    episodes: list[EvaluatedEpisode] = []
    environments: dict[str, str] = {}
    with contextlib.closing(reader), reader.remembering():
        for line in reader.episodes(sort="admitted_at", descending=False, limit=1_000_000):
            if line.status == "repeated":
                continue
            environments[line.episode] = line.environment
            view = read_conversation(reader, line.episode)
            rewards = [agent.reward for agent in view.agents if agent.reward is not None]
            messages_of: dict[str, list[dict[str, Any]]] = {}
            for act in view.acts:
                if isinstance(act, PolicyTurn):
                    name = act.seat if act.index == 0 else f"{act.seat}[{act.index}]"
                    messages_of.setdefault(name, []).extend([*act.messages, act.message()])
            episodes.append(
                EvaluatedEpisode(
                    id=line.episode,
                    parent_id=line.parent,
                    task=view.task,
                    task_id=line.task,
                    reward=sum(rewards) if rewards else None,
                    rewards=line.rewards,
                    stop_reason=line.stop_reason,
                    detail=line.detail or "",
                    turns=line.turns or 0,
                    tokens=line.tokens or 0,
                    metrics={name: value for name, value in view.metrics.items() if value is not None},
                    conversations=messages_of,
                )
            )
    return episodes, environments


def _by_policy(
    policies: Mapping[str, AnyPolicy], policy: Directory | Mapping[str, Directory] | None
) -> Mapping[str, Directory]:
    """Return the directory of weights of each policy."""
    if policy is None:
        return {}
    known_policies = ", ".join(policies)
    if isinstance(policy, Mapping):
        unknown = [name for name in policy if name not in policies]
        if unknown:
            raise InputError(f"no policy {unknown[0]!r} to load weights into; policies: {known_policies}")
        return policy
    names = [name for name in policies if isinstance(policies[name], PolicyConfig)] or list(policies)
    if len(names) > 1:
        raise InputError(
            f"{policy} is given without a policy, and the run has several; write NAME=DIR. Policies: {known_policies}"
        )
    return {names[0]: policy}


def _check_tasks(
    config: RunConfig,
    environment: type[Environment],
    chat_format: ChatFormat,
    splits: Sequence[HeldOutSplit],
    *,
    are_given: bool,
) -> Iterator[str]:
    """Yield warnings about the tasks of an evaluation.

    Raises:
        ConfigError: none of the first prompts fits the context.
    """
    if not are_given:
        training = _training_tasks(config.environment, config.seed, environment)
        yield from RunTasks.read(training, splits).warnings()
    if config.bases:
        evaluated = [task for split in splits for task in split.tasks]
        prompts = first_prompts(environment, evaluated, chat_format)
        yield from check_prompts(prompts, config.engine.max_context)


def prepare_evaluation(
    config: RunConfig,
    policy: Directory | Mapping[str, Directory] | None,
    on_phase: Callable[[str, str], None] = lambda phase, part: None,
) -> tuple[RunConfig, Sequence[WeightsRef]]:
    """Return a configuration whose policies are served and not trained, and the weights that differ from the base
    model's.

    Raises:
        InputError: `policy` gives weights that cannot be used.
    """
    config = with_frozen_policies(
        config,
        [weights_from_directory(name, path) for name, path in _by_policy(config.policies, policy).items()],
        config.evaluation.sampling.changes,
    )
    check_local_models(config)
    check_endpoints(config.policies)
    if names := [path for path in model_paths(config).values() if is_hub_name(path)]:
        on_phase(f"finding {', '.join(names)} on the Hugging Face hub, or in its cache", "")
    config = with_downloaded_models(config, {})
    if config.bases:
        on_phase("loading torch and transformers, and reading the model's shapes", "")
    dtype = config.model.dtype
    config, chosen = with_chosen_settings(config, {})
    if config.model.dtype != dtype:
        warnings.warn(chosen.dtype, stacklevel=1)
    check_tokenizers(config.engine_plan)
    return config, frozen_policy_weights(config.bases)


async def play_in_new_run(
    config: RunConfig,
    environment: type[Environment],
    chat_format: ChatFormat,
    frozen_weights: Sequence[WeightsRef],
    run: Path,
    play: Play,
    on_phase: Callable[[str, str], None] = lambda phase, part: None,
) -> list[EpisodeHeader]:
    """Play episodes with the engine of a configuration, into the journal of a new run; see `play_without_training`."""
    from agentrl.journal.store import SqliteJournal

    if hidden := hidden_tools(config.rollout_plan, environment, chat_format):
        warnings.warn(hidden, stacklevel=1)
    for line in await asyncio.to_thread(check_gpu_memory, config.engine_plan, config.trainer_plan):
        warnings.warn(line, stacklevel=1)
    async with contextlib.AsyncExitStack() as stack:
        remote = [f"{policy.model} at {policy.url}" for policy in config.of_kind(RemotePolicy).values()]
        weights_text = ", ".join(
            [weights.path for weights in frozen_weights]
            or [base.path for base in config.bases]
            or dict.fromkeys(remote)
        )
        info = {
            "name": run.name,
            "evaluated": weights_text,
            "config": config.model_dump(mode="json"),
            "code": importable_environment_code(environment),
        }
        store = SqliteJournal(run / "journal", info=info)
        stack.push_async_callback(store.close)
        stack.enter_context(recording_process_state(run))
        await stack.enter_async_context(gpu_reservation())
        versions = {name: PolicyVersion(name, 0, 0) for name in config.policies}
        phase = "starting"
        if config.bases:
            memory = await asyncio.to_thread(memory_line, config.engine_plan, config.trainer_plan)
            phase = f"starting the engine: it loads the model, and checks itself ({memory})"
        clock = SystemClock()
        began = clock.monotonic()
        on_phase(phase, "")
        engine = await reporting(
            make_engine(config.engine_plan, versions, lambda line: on_phase(phase, line)),
            lambda: on_phase(phase, f"{clock.monotonic() - began:.0f} s"),
        )
        stack.push_async_callback(engine.close)
        await serve_configured_weights(config.bases, ServedVersions(engine), store, frozen_weights)
        # The warning comes from the watching thread, while the loop is blocked.
        with watch_event_loop(lambda line: warnings.warn(line, stacklevel=1), users_only=True):
            headers = await play_without_training(config.rollout_plan, environment, engine, chat_format, store, play)
        record_process_state(run, "finished")
        return headers


def with_frozen_policies(
    config: RunConfig,
    frozen_weights: Sequence[WeightsRef],
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> RunConfig:
    """Return the configuration without trained policies, and with an engine that can serve the given weights;
    `sampling` has what differs from `[sampling]` for the policies that were trained."""
    paths = dict.fromkeys(config.trained, "") | {weights.version.policy: weights.path for weights in frozen_weights}
    frozen = {
        name: FrozenPolicy.model_validate(
            config.policies[name].model_dump(include=set(LocalPolicy.model_fields))
            | {
                "kind": "frozen",
                "path": path,
                "scored": name in config.trained or getattr(config.policies[name], "scored", False),
                "sampling": config.sampling_of(name).model_dump() | (dict(sampling) if name in config.trained else {}),
            }
        )
        for name, path in paths.items()
    }
    return config.model_copy(update={"policies": {**config.policies, **frozen}})


async def reporting(playing: Coroutine[Any, Any, T], report: Callable[[], None]) -> T:
    """Wait for a coroutine, and call `report` twice a second meanwhile."""
    running = asyncio.get_running_loop().create_task(playing)
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=PROGRESS_S)
            report()
        return running.result()
    finally:
        running.cancel()


async def play_without_training(
    plan: RolloutPlan,
    environment: type[Environment],
    engine: Engine,
    chat_format: ChatFormat,
    store: JournalStore,
    play: Play,
) -> list[EpisodeHeader]:
    """Play episodes outside training: `play` gets a dispatcher whose buffer stays empty. Returns the headers.

    Raises:
        BaseException: a failure that is no episode's fault.
    """
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[list[EpisodeHeader]] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not failure.done():
            failure.set_exception(error)

    buffer = EpisodeBuffer((), WholeGroupRelease((), REWARD_ESTIMATORS["none"]))
    dispatcher = make_dispatcher(
        environment=environment,
        policy_of=plan.seats.policy_of,
        run_seed=plan.seed,
        group_size=plan.credit.group_size,
        max_in_flight=first_limit(plan.max_in_flight, engine.capabilities.places, plan.credit.group_size),
        buffer=buffer,
        store=store,
        changed=ChangeCondition(),
        fail=fail,
    )
    host = DispatchingHost(dispatcher)
    dispatcher.run(make_local_worker(plan, environment, host, engine, chat_format, store, SystemClock(), fail))
    episodes = loop.create_task(play(dispatcher))
    try:
        first, _ = await asyncio.wait({episodes, failure}, return_when=asyncio.FIRST_COMPLETED)
        return first.pop().result()
    finally:
        episodes.cancel()
        failure.cancel()
        await dispatcher.worker.cancel()
