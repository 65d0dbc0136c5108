"""The scorers of a run: functions and judges that give turns or conversations a named reward
(docs/how-to/scores.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.fields import (
    Code,
    DerivedDefault,
    Free,
    Label,
    Location,
    NonNegative,
    NumberUnit,
    Options,
    Positive,
    Seconds,
    Section,
    WaveFixed,
    check_function_name,
)
from agentrl.core.ports import ScoreCredit, ScoreOf

Score = Annotated[float, Field(ge=-1e6, le=1e6)]


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
    """Limits on a scorer's use in the whole run. At a limit, the run writes a checkpoint and stops; raise the limit to
    resume. Scores then in progress and scores of dropped episodes may exceed it."""

    requests: Free[Annotated[NonNegative, NumberUnit("requests")]] = 0
    """Calls of the function or model, including votes and retries; 0: no limit."""
    tokens: Free[Annotated[NonNegative, NumberUnit("tokens")]] = 0
    """Tokens that models compute for the scorer; 0: no limit."""


class ScorerConfig(Section):
    """A scorer gives turns or conversations a reward under its name while episodes run (docs/how-to/scores.md)."""

    function: WaveFixed[Code[str]] = ""
    """A function marked with `agentrl.scorer`: `module:function`, an installed name, or `path/to/file.py:function`."""
    options: WaveFixed[Code[Options]] = {}
    """Arguments of the function."""
    judge: WaveFixed[Label[str]] = ""
    """Policy that scores in place of a function. A policy that learns must hold a seat; a remote, frozen or past policy
    need not."""
    rubric: WaveFixed[Label[str]] = ""
    """Instructions for the judge: text, or the path of a `.md` or `.txt` file. The run records the text."""
    answer: WaveFixed[Label[dict[str, Score]]] = {}
    """Score of each possible answer, such as `{ yes = 1.0, no = 0.0 }`. The judge's reply must end with the line
    `Answer: yes`; any other reply is refused, and the judge asked again."""
    scale: WaveFixed[tuple[Score, Score] | None] = None
    """Lowest and highest score of a judge without `answer`, such as `[0, 10]`. Its reply must end with the line
    `Score: 8`; any other reply, or a number outside of the scale, is refused, and the judge asked again."""
    reward_model: WaveFixed[Location[str]] = ""
    """Hugging Face model that scores in place of a function, as a directory or hub name: sequence or token
    classification, with a causal backbone and one or two outputs. It runs in its own process."""
    steps: WaveFixed[Label[str]] = ""
    r"""Text that ends a step within a turn, such as `"\n\n"`, if the reward model scores steps. Empty: only the end of
    the turn is scored."""
    combine: WaveFixed[Literal["mean", "min", "last"]] = "mean"
    """How a turn's step scores are combined."""
    device: WaveFixed[Literal["auto", "cpu"]] = "auto"
    """Device of the reward model. `auto`: a GPU that neither trainer nor engine uses, else the CPU."""
    cache_tokens: Free[Annotated[NonNegative, NumberUnit("tokens")]] = 32768
    """Conversation tokens whose keys and values the reward model caches between turns. Beyond this, they are
    recomputed."""
    votes: WaveFixed[Annotated[int, Field(ge=0, le=1024), NumberUnit("replies")]] = 1
    """Replies sampled per score; the score is their mean. 0: sample none, and use the expected `answer` under the
    judge's probabilities of each answer as the start of the reply. Remote judges need at least 1."""
    per: WaveFixed[ScoreOf] = "turn"
    """What is scored. `turn`: every turn of the policies that learn. `episode`: their whole conversations, when the
    episode ends. `group`: the conversations of a group together, when its last member has ended. `request`: only turns
    for which the environment calls `ctx.score`."""
    credit: Annotated[
        WaveFixed[ScoreCredit], DerivedDefault("`difference` for turns scored by a reward model, else `reward`")
    ] = Field(default_factory=_default_credit)
    """How the score is paid. `reward`: as it is. `difference`: the change from the agent's previous score (first: from
    0), so that extra turns earn nothing (Ng et al., 1999). `note`: not at all; it is recorded, and `run()` can read
    it."""
    attempts: Free[Annotated[Positive, NumberUnit("requests")]] = 4
    """Attempts per score, with waits of 1 to 30 s between them."""
    timeout_s: Free[Seconds] = 60.0
    """Time limit of an attempt."""
    max_concurrent: Free[Annotated[Positive, NumberUnit("scores")]] = 64
    """Maximum number of scores in progress, over all `workers`."""
    cache: Annotated[WaveFixed[NonNegative], DerivedDefault("4096 for a judge, 0 for others")] = Field(
        default_factory=_default_cache
    )
    """Number of scores that each worker caches: equal content is scored once, also after a resume. For a judge, the
    content is the conversation alone. Judges that learn have no cache."""
    limit: ScoreLimitConfig = ScoreLimitConfig()
    """What the scorer may use in the whole run."""
    on_failure: WaveFixed[Label[str]] = "drop"
    """What happens when all attempts have failed: `drop` drops the episode (`scorer_failed`); a scorer's name calls
    that scorer."""
    unscorable: WaveFixed[Annotated[Score, NumberUnit("reward")] | None] = None
    """Score of content that cannot be judged: a function raises `agentrl.Unscorable`, an endpoint refuses it, or it
    exceeds the model's context. Null stops the run instead. Required for judges and reward models."""

    def check(self) -> None:
        if sum(map(bool, (self.function, self.judge, self.reward_model))) != 1:
            raise ValueError(
                "name who scores, and only one: function = 'mine.py:short', judge = a policy of the run, or "
                "reward_model = a directory"
            )
        if self.steps and not self.reward_model:
            raise ValueError("steps are scored by reward models: remove steps, or name a reward_model")
        if self.options and not self.function:
            raise ValueError("options are arguments of a function: remove them")
        if not self.function and self.unscorable is None:
            raise ValueError(
                "set unscorable, the score of content that the model cannot judge (refused, or longer than its context)"
            )
        if self.judge:
            self._check_judge()
        elif self.rubric or self.answer or self.scale or self.votes != 1:
            raise ValueError("rubric, answer, scale and votes are for judges: remove them, or name a judge")
        self._check_per()
        if self.function:
            check_function_name("scorer", self.function)

    def _check_judge(self) -> None:
        if not self.rubric.strip():
            raise ValueError("a judge needs a rubric: the text of the question, or the name of a .md or .txt file")
        if is_rubric_file(self.rubric):
            raise ValueError(f"rubric = {self.rubric!r} names a file, which only a TOML file may do: give its text")
        if not self.votes and not self.answer:
            raise ValueError("votes = 0 computes the probabilities of answers: set answer, or votes = 1")
        if bool(self.answer) == bool(self.scale):
            raise ValueError(
                "a judge gives an answer or a number, and not both: set answer = { yes = 1.0, no = 0.0 }, or the scale "
                "of the rubric, such as scale = [0, 10]"
            )
        if self.scale and not self.scale[0] < self.scale[1]:
            raise ValueError("scale = [LOWEST, HIGHEST] needs a lowest score below the highest")
        for answer in self.answer:
            words = " ".join(answer.casefold().split()).strip("#*_`.").replace(",", "")
            if not words or words != answer:
                raise ValueError(
                    f"answer: {answer!r}: write answers as words in lower case, without commas, and without . # * _ ` "
                    "around them"
                )

    def _check_per(self) -> None:
        if self.per == "group" and (self.reward_model or (self.judge and not self.votes)):
            raise ValueError(
                "per = 'group' compares the conversations of a group, which a function can, or a judge with votes = 1 "
                "or more: set per = 'episode'"
            )
        if self.credit == "difference" and self.per in ("episode", "group"):
            raise ValueError("credit = 'difference' compares the scores of an agent's turns: set per = 'turn'")
