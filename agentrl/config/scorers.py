"""The scorers of a run: functions and judges that give turns or conversations a named reward (docs/scores.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.fields import (
    DerivedDefault,
    Free,
    NonNegative,
    NumberUnit,
    Positive,
    Seconds,
    Section,
    WaveFixed,
    check_function_name,
)
from agentrl.core.ports import ScoreCredit, ScoreOf


def is_rubric_file(rubric: str) -> bool:
    """Whether a rubric is a file name."""
    return rubric.endswith((".md", ".txt")) and "\n" not in rubric


def reward_model_name(scorer: str) -> str:
    """Return the name under which the run's engine serves the reward model of a scorer; no policy has such a name."""
    return f"reward model {scorer}"


def _default_credit(scorer: dict[str, Any]) -> ScoreCredit:
    return "difference" if scorer.get("reward_model") and scorer.get("per") not in ("episode", "group") else "reward"


def _default_cache(scorer: dict[str, Any]) -> int:
    return 4096 if scorer.get("judge") else 0


class ScoreLimitConfig(Section):
    """What a scorer may use in a run. When a limit is reached, the run writes a checkpoint and stops; raise the limit
    to resume it. Scores in flight then, and those of dropped episodes, are in addition."""

    requests: Free[Annotated[NonNegative, NumberUnit("requests")]] = 0
    """Calls of the function or the model, votes and retries included; 0: no limit."""
    tokens: Free[Annotated[NonNegative, NumberUnit("tokens")]] = 0
    """Tokens that models compute for it; 0: no limit."""


class ScorerConfig(Section):
    """A scorer, which gives turns or conversations a reward of its name while episodes run (docs/scores.md)."""

    function: WaveFixed[str] = ""
    """A function marked with `agentrl.scorer`: `module:function`, the name of one that an installed package provides,
    or `path/to/file.py:function`, in a TOML file relative to that file."""
    options: WaveFixed[dict[str, Any]] = {}
    """Arguments of the function."""
    judge: WaveFixed[str] = ""
    """Policy of the run that scores instead of a function: one that is remote, frozen or past, which needs no seat, or
    that learns."""
    rubric: WaveFixed[str] = ""
    """Instructions for the judge: text, or the name of a `.md` or `.txt` file, relative to the TOML file that names it.
    The run records the text."""
    answer: WaveFixed[dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]]] = {}
    """Value of each answer, such as `{ yes = 1.0, no = 0.0 }`; the last one in the judge's reply counts. Empty: the
    last number in the reply is the score."""
    reward_model: WaveFixed[str] = ""
    """Directory of a Hugging Face model that scores instead of a function, or its name on the hub: sequence or token
    classification with a causal backbone, one output or two. It runs in a process of its own."""
    steps: WaveFixed[str] = ""
    """Text that ends a step within a turn, such as `"\\n\\n"`, for reward models that score steps. Empty: the end of
    the turn is scored."""
    combine: WaveFixed[Literal["mean", "min", "last"]] = "mean"
    """What makes the turn's score of its steps' scores."""
    device: WaveFixed[Literal["auto", "cpu"]] = "auto"
    """Where a reward model computes. `auto`: on a GPU that neither the trainer nor an engine uses, else on the CPU."""
    cache_tokens: Free[Annotated[NonNegative, NumberUnit("tokens")]] = 32768
    """Number of tokens of conversations whose keys and values a reward model keeps between turns. A conversation that
    has left is computed from its start."""
    votes: WaveFixed[Annotated[int, Field(ge=0, le=1024), NumberUnit("replies")]] = 1
    """Number of replies sampled for one score; the score is their mean. 0: the expected value of `answer`, computed
    from the probabilities with which the judge's reply begins with each answer. An endpoint gives no probabilities."""
    per: WaveFixed[ScoreOf] = "turn"
    """What is scored: `turn`, every turn of the policies that learn; `episode`, their whole conversations, when the
    episode ends; `group`, the conversations of a group together, when its last member has ended; `request`, only the
    turns for which the environment calls `ctx.score`."""
    credit: Annotated[WaveFixed[ScoreCredit], DerivedDefault("`difference` for a reward model")] = Field(
        default_factory=_default_credit
    )
    """What a score is credited as: `reward`, itself; `difference`, its difference to the agent's score before it, or to
    0, so that more turns are not paid more (Ng et al., 1999); `note`, nothing: it is recorded, and `run()` can read it.
    Default: `difference` for a reward model that scores turns, else `reward`."""
    attempts: Free[Annotated[Positive, NumberUnit("requests")]] = 4
    """Number of times that a failing scorer is asked for one score, with waits of 1 to 30 s in between."""
    timeout_s: Free[Seconds] = 60.0
    """Time limit of each."""
    max_concurrent: Free[Annotated[Positive, NumberUnit("scores")]] = 64
    """Maximum number of scores in progress at once, over all `workers`."""
    cache: Annotated[WaveFixed[NonNegative], DerivedDefault("4096 for a judge")] = Field(default_factory=_default_cache)
    """Number of contents whose scores each worker keeps: equal content is scored once, also after a resume. Default:
    4096 for a judge, to which only the conversation counts; 0 for a function. A judge that learns keeps none."""
    limit: ScoreLimitConfig = ScoreLimitConfig()
    """What the scorer may use in the whole run."""
    on_failure: WaveFixed[str] = "drop"
    """What follows when all attempts have failed: `drop` drops the episode (`scorer_failed`), or the name of another
    scorer, which is called instead. Never a number."""
    unscorable: WaveFixed[Annotated[float, Field(ge=-1e6, le=1e6), NumberUnit("reward")] | None] = None
    """Score of content that no attempt can judge: a function raises `agentrl.Unscorable`; a judge's endpoint refuses
    the content, or it is longer than the model's context. Null: such content stops the run. Judges and reward models
    need a value."""

    def check(self) -> None:
        if sum(map(bool, (self.function, self.judge, self.reward_model))) != 1:
            raise ValueError(
                "name who scores, and only one: function = 'mine.py:short', judge = a policy of the run, or "
                "reward_model = a directory"
            )
        if not self.judge and (self.rubric or self.answer or self.votes != 1):
            raise ValueError("rubric, answer and votes are for judges: remove them, or name a judge")
        if self.steps and not self.reward_model:
            raise ValueError("steps are scored by reward models: remove steps, or name a reward_model")
        if self.judge and not self.votes and not self.answer:
            raise ValueError("votes = 0 computes the probabilities of answers: set answer, or votes = 1")
        if self.judge and not self.rubric.strip():
            raise ValueError("a judge needs a rubric: the text of the question, or the name of a .md or .txt file")
        if is_rubric_file(self.rubric):
            raise ValueError(f"rubric = {self.rubric!r} names a file, which only a TOML file may do: give its text")
        if self.options and not self.function:
            raise ValueError("options are arguments of a function: remove them")
        if not self.function and self.unscorable is None:
            raise ValueError(
                "set unscorable, the score of content that the model cannot judge (refused, or longer than its context)"
            )
        if bad_answers := [answer for answer in self.answer if not answer.strip() or answer != answer.casefold()]:
            raise ValueError(f"answer: {bad_answers[0]!r}: write answers as words in lower case")
        self._check_per()
        if self.function:
            check_function_name("scorer", self.function)

    def _check_per(self) -> None:
        if self.per == "group" and (self.reward_model or (self.judge and not self.votes)):
            raise ValueError(
                "per = 'group' compares the conversations of a group, which a function can, or a judge with votes = 1 "
                "or more: set per = 'episode'"
            )
        if self.credit == "difference" and self.per in ("episode", "group"):
            raise ValueError("credit = 'difference' compares the scores of an agent's turns: set per = 'turn'")
