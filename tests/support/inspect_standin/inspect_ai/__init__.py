"""The part of inspect-ai that agentrl and the tests use, for tests without the package."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import urllib.request
from types import SimpleNamespace

for part in ("dataset", "model", "scorer", "solver"):
    sys.modules[f"{__name__}.{part}"] = sys.modules[__name__]


class Sample:
    def __init__(self, input, target="", id=None, choices=None, metadata=None):
        self.input, self.target, self.id, self.choices, self.metadata = input, target, id, choices, metadata

    def model_dump(self, exclude):
        return {name: value for name, value in vars(self).items() if name not in exclude}


class MemoryDataset(list):
    def shuffle(self, seed=None):
        (random if seed is None else random.Random(seed)).shuffle(self)

    def filter(self, predicate):
        return MemoryDataset(filter(predicate, self))


class Epochs:
    def __init__(self, epochs, reducer=None):
        self.epochs, self.reducer = epochs, reducer or "mean"


class Task:
    def __init__(self, dataset, solver=None, scorer=None, epochs=1):
        self.dataset, self.epochs = dataset, epochs if isinstance(epochs, Epochs) else Epochs(epochs)
        self.scorer = scorer if isinstance(scorer, list) or scorer is None else [scorer]


def task(function):
    return function


def generate():
    return None


def mean():
    return None


class Score:
    def __init__(self, value, reason=None, explanation=None):
        self.value, self.reason, self.explanation = value, reason, explanation

    @classmethod
    def unscored(cls, reason=None, explanation=None):
        return cls(float("nan"), reason, explanation)


def scorer(metrics, name=None):
    def mark(make):
        def named(*arguments, **options):
            score = make(*arguments, **options)
            score.scorer_name = name or make.__name__
            return score

        return named

    return mark


@scorer(metrics=[])
def match(location="end"):
    async def score(state, target):
        return Score("C" if state.output.completion.endswith(target) else "I")

    return score


def value_to_float():
    known = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "no": 0.0}

    def convert(value):
        if isinstance(value, int | float):
            return value
        if isinstance(value, str) and value in known:
            return known[value]
        try:
            return float(value)
        except (TypeError, ValueError):
            return 0.0  # with a warning

    return convert


def get_model(name, base_url, api_key, responses_api):
    def ask(messages):
        body = json.dumps({"model": name, "messages": messages}).encode()
        headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
        answer = urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers))
        return json.load(answer)["choices"][0]["message"]["content"]

    return ask


def eval(task, model, epochs=None, **more):
    print("noise on standard output")
    samples = []
    played = Epochs(epochs, task.epochs.reducer) if isinstance(epochs, int) else epochs or task.epochs
    if played.reducer == "pass_at_2" and played.epochs < 2:
        raise ValueError("Reducer 'pass_at_2' requires 2 epochs however evaluation has only 1 epochs.")
    for _ in range(played.epochs):
        for sample in task.dataset:
            text = [{"role": "user", "content": sample.input}]
            reply = model(text if isinstance(sample.input, str) else sample.input)
            if reply == "again":
                reply = model([{"role": "user", "content": "again"}])
            state = SimpleNamespace(output=SimpleNamespace(completion=reply), sample_id=sample.id)
            stated = {score.scorer_name: asyncio.run(score(state, sample.target)) for score in task.scorer or []}
            scores = {name: score for name, score in stated.items() if score is not None}
            samples.append(SimpleNamespace(id=sample.id, scores=scores or None))
    return [SimpleNamespace(status="success", samples=samples)]
