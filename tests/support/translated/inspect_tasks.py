"""Tasks of Inspect, each with a trait that an adapter may lose."""

from __future__ import annotations

from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, match, mean, scorer
from inspect_ai.solver import generate


def of(samples, scorer=None, **more):
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=scorer or match(), **more)


def stating(value, name="stated"):
    @scorer(metrics=[mean()], name=name)
    def make():
        async def score(state, target):
            if value == "unscored":
                return Score.unscored(reason="invalid_response_format")
            return None if value == "none" else Score(value=value)

        return score

    return make()


@task
def one():
    return of([Sample(id="a", input="Say 0", target="0")])


@task
def epochs(number=3, reducer="mean"):
    return of([Sample(id="a", input="Say 0", target="0")], epochs=Epochs(number, reducer))


@task
def epochs_as_number():
    return of([Sample(id="a", input="Say 0", target="0")], epochs=4)


@task
def shuffled(seed=None):
    task = of([Sample(input=f"Say {n}", target=str(n)) for n in range(50)])
    task.dataset.shuffle(seed)
    return task


@task
def shuffled_after_ids():
    """As readers with `auto_id`, whose ids are positions."""
    samples = [Sample(input=f"Say {n}", target=str(n)) for n in range(2_000)]
    task = of(samples)
    task.dataset.shuffle()
    for position, sample in enumerate(task.dataset):
        sample.id = position
    return task


@task
def drawn(share=3):
    """A sample of a larger set, drawn anew in each process."""
    import random

    return of([Sample(input=f"Say {n}", target=str(n)) for n in random.sample(range(10**9), share)])


@task
def equal():
    return of([Sample(input="Say 0", target="0"), Sample(input="Say 0", target="0"), Sample(input="Say 1", target="1")])


@task
def twins():
    return of([Sample(id="a", input="Say 0", target="0"), Sample(id="a", input="Say 1", target="1")])


@task
def patterns():
    """Ids that are patterns in Inspect's option `sample_id`."""
    return of([Sample(id=id, input=f"Say {id}", target="1") for id in ("a*", "ab", "a?", "one:b", "1", "01")])


@task
def unscored():
    return Task(dataset=MemoryDataset([Sample(id="a", input="Say 0", target="0")]), solver=generate())


@task
def states(value, name="stated"):
    return of([Sample(id="a", input="Say 0", target="0")], stating(value, name))


@task
def two_scorers(first="5_shot", second="précision"):
    return of([Sample(id="a", input="Say 0", target="0")], [stating(1.0, first), stating(0.5, second)])


@task
def messages():
    return of([Sample(id="a", input=system_and_user(), target="0")])


def system_and_user():
    try:
        from inspect_ai.model import ChatMessageSystem, ChatMessageUser
    except ImportError:
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 0"}]
    return [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="Say 0")]


@task
def messages_without_ids():
    return of([Sample(input=system_and_user(), target="0")])
