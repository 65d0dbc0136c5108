from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate


@task
def sums():
    return Task(
        dataset=MemoryDataset(
            [
                Sample(id=n, input=f"What is {n} + {3 * n + 1}? Answer with the number only.", target=str(4 * n + 1))
                for n in range(12)
            ]
        ),
        solver=generate(),
        scorer=[match(location="exact"), includes()],
    )
