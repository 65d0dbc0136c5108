"""The scorers of a run: functions and judges that give turns or conversations a named reward (docs/scores.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.fields import Free, NumberUnit, Positive, Seconds, Section, check_function_name


def is_rubric_file(rubric: str) -> bool:
    """Whether a rubric is a file name."""
    return rubric.endswith((".md", ".txt")) and "\n" not in rubric


class ScorerConfig(Section):
    """A scorer, which gives turns or conversations a reward of its name while episodes run (docs/scores.md)."""

    function: Free[str] = ""
    """A function marked with `agentrl.scorer`: `module:function`, the name of one that an installed package provides,
    or `path/to/file.py:function`, in a TOML file relative to that file."""
    options: Free[dict[str, Any]] = {}
    """Arguments of the function."""
    judge: Free[str] = ""
    """Remote or frozen policy of the run that scores instead of a function. It needs no seat."""
    rubric: Free[str] = ""
    """Instructions for the judge: text, or the name of a `.md` or `.txt` file, relative to the TOML file that names it.
    The run records the text."""
    answer: Free[dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]]] = {}
    """Value of each answer, such as `{ yes = 1.0, no = 0.0 }`; the last one in the judge's reply counts. Empty: the
    last number in the reply is the score."""
    votes: Free[Annotated[int, Field(gt=0, le=1024), NumberUnit("replies")]] = 1
    """Number of replies sampled for one score; the score is their mean."""
    per: Free[Literal["turn", "episode", "request"]] = "turn"
    """What is scored: `turn`, every turn of the policies that learn; `episode`, their whole conversations, when the
    episode ends; `request`, only the turns for which the environment calls `ctx.score`."""
    credit: Free[Literal["reward", "difference", "note"]] = "reward"
    """What a score is credited as: `reward`, itself; `difference`, its difference to the agent's score before it, or to
    0, so that more turns are not paid more (Ng et al., 1999); `note`, nothing: it is recorded, and `run()` can read it.
    """
    attempts: Free[Annotated[Positive, NumberUnit("requests")]] = 4
    """Number of times that a failing scorer is asked for one score, with waits of 1 to 30 s in between."""
    timeout_s: Free[Seconds] = 60.0
    """Time limit of each."""
    max_concurrent: Free[Annotated[Positive, NumberUnit("scores")]] = 64
    """Maximum number of scores in progress at once, over all `workers`."""
    on_failure: Free[str] = "drop"
    """What follows when all attempts have failed: `drop` drops the episode (`scorer_failed`), or the name of another
    scorer, which is asked instead. Never a number."""
    unscorable: Free[Annotated[float, Field(ge=-1e6, le=1e6), NumberUnit("reward")] | None] = None
    """Score of content that no attempt can judge: a function raises `agentrl.Unscorable`; a judge's endpoint refuses
    the content, or it is longer than the judge's context. Null: such content stops the run. Judges need a value."""

    def check(self) -> None:
        if bool(self.function) == bool(self.judge):
            raise ValueError("name who scores: function = 'mine.py:short', or judge = a policy of the run, not both")
        if self.function and (self.rubric or self.answer or self.votes > 1):
            raise ValueError("rubric, answer and votes are for judges: remove them, or replace function by judge")
        if self.judge and not self.rubric.strip():
            raise ValueError("a judge needs a rubric: the text of the question, or the name of a .md or .txt file")
        if is_rubric_file(self.rubric):
            raise ValueError(f"rubric = {self.rubric!r} names a file, which only a TOML file may do: give its text")
        if self.judge and self.options:
            raise ValueError("options are arguments of a function: remove them")
        if self.judge and self.unscorable is None:
            raise ValueError(
                "set unscorable, the score of content that the judge cannot judge (refused, or longer than its context)"
            )
        if lost := [answer for answer in self.answer if not answer.strip() or answer != answer.casefold()]:
            raise ValueError(f"answer: {lost[0]!r}: write answers as words in lower case")
        if self.credit == "difference" and self.per == "episode":
            raise ValueError("credit = 'difference' compares the scores of an agent's turns: set per = 'turn'")
        if self.function:
            check_function_name("scorer", self.function)
