"""Builds the tiny model in this directory: it knows both roles' format, and its solver often stops early on long sums.

`python -m agentrl.environments.propose_and_solve.build_model [--seed 0] [--steps 700] [--output DIR]`, a few minutes on
one core. Tokenizer and chat template are the calculator's. The proposer sees short sums and a few longer ones. The
solver sees correct calls, but stops early more often with more terms. By reward, the solver learns to finish, and the
proposer learns which sums teach it.
"""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

import agentrl
from agentrl.core.ids import random_stream
from agentrl.core.records import Message
from agentrl.environments.calculator import build_model as calculator
from agentrl.environments.calculator.demonstrations import call_text, observation
from agentrl.environments.propose_and_solve.env import PROMPT, Solve, Sum, drawn_sum
from agentrl.environments.tiny_model import model as tiny_model
from agentrl.rollout.chat.chat_format import TemplateChatFormat

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from agentrl.core.records import ToolSpec

CONTEXT = 256
FINISH = {2: 0.95, 3: 0.5, 4: 0.35, 5: 0.22, 6: 0.14}
"""Probability that a demonstrated solver performs all operations, by number of terms."""
LENGTH_WEIGHTS = {2: 0.88, 3: 0.06, 4: 0.03, 5: 0.02, 6: 0.01}
"""Number of demonstrated proposals, by number of terms."""


def build(directory: Path, *, seed: int, steps: int) -> None:
    """Write tokenizer, template, configuration and warmed-up weights into `directory`."""
    source = Path(calculator.__file__).parent / "model"
    tiny_model.write_chat_template(
        directory, tiny_model.TEMPLATE, pad="<|pad|>", end="<|im_end|>", context=calculator.CONTEXT
    )
    shutil.copyfile(source / "tokenizer.json", directory / "tokenizer.json")
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    chat = TemplateChatFormat.load(directory)
    pad, stop = chat.encode("<|pad|>")[0], chat.stop_token_ids[0]
    model = tiny_model.random_model(
        vocabulary=vocabulary, pad_token=pad, stop_token=stop, context=CONTEXT, hidden=128, layers=4
    )
    tools = [bound.spec for bound in Solve.tool_table().values()]
    rows = (shown_row(chat, tools, random_stream("warm-up", seed, number)) for number in count())
    tiny_model.train_supervised(model, rows, steps=steps, on_step=tiny_model.progress_printer("warm-up", steps))
    tiny_model.save_model(model, directory, stop_tokens=stop)


def shown_row(chat: TemplateChatFormat, tools: Sequence[ToolSpec], random: Random) -> tiny_model.Row:
    """Return the ids of a proposer's or, twice as often, a solver's conversation, and a mask of the replies."""
    if random.random() < 1 / 3:
        (terms,) = random.choices(list(LENGTH_WEIGHTS), list(LENGTH_WEIGHTS.values()))
        messages, tools_of_row = [(PROMPT, False), (drawn_sum(random, terms).text, True)], []
    else:
        messages, tools_of_row = solution_messages(drawn_sum(random, random.randint(2, 6)), random), list(tools)
    ids: list[int] = []
    mask: list[bool] = []
    for text, is_reply in messages:
        if is_reply:
            new = [*chat.encode(text), chat.stop_token_ids[0]]
        elif not ids:
            new = chat.start([agentrl.user(text)], tools_of_row)
        else:
            new = chat.extend([Message(role="tool", content=text)], after="stop")
        ids += new
        mask += [is_reply] * len(new)
    return ids, mask


def solution_messages(problem: Sum, random: Random) -> list[tuple[str, bool]]:
    """Return a solver's conversation as pairs (text, whether it is a reply of the solver)."""
    terms = problem.terms
    operations = len(terms) - 1
    if random.random() >= FINISH[len(terms)]:
        operations = random.randrange(operations)
    value = str(terms[0])
    messages = [(problem.task()["question"], False)]
    for term in terms[1 : operations + 1]:
        call = call_text(int(value), "-" if term < 0 else "+", abs(term))
        value = observation(call)
        messages += [(call, True), (value, False)]
    return [*messages, (value, True)]


if __name__ == "__main__":
    tiny_model.build_model_command(
        build, directory=Path(__file__).parent / "model", steps=700, description=__doc__ or ""
    )
