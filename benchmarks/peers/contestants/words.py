"""Word problems that are answered with their calculation: `412 * 37`. The prompt and the reward of all contestants."""

import operator
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALCULATION = re.compile(r"(\d{1,9}) ([-+*]) (\d{1,9})")
SHOWN = (
    {"role": "system", "content": "Write the calculation."},
    {"role": "user", "content": "What is 31 times 12?"},
    {"role": "assistant", "content": "31 * 12"},
    {"role": "user", "content": "A shop had 250 apples and sold 67. How many are left?"},
    {"role": "assistant", "content": "250 - 67"},
)


def prompt(question):
    return [*SHOWN, {"role": "user", "content": question}]


def reward(text, answer):
    match = CALCULATION.fullmatch(text.strip())
    return float(match is not None and str(OPERATORS[match[2]](int(match[1]), int(match[3]))) == answer)
