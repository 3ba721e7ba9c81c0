"""Tasks in the form of Inspect, in an interpreter that has `inspect_ai`."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: The first one.
            y: The second one.
        """
        return x + y

    return execute


@task
def sums(count: int = 4):
    samples = [
        Sample(input=f"How much is {n} and {n + 1}?", target=str(2 * n + 1), id=f"sum-{n}") for n in range(count)
    ]
    return Task(dataset=samples, solver=[system_message("Be short."), use_tools(add()), generate()], scorer=match())


@task
def echo():
    return Task(dataset=[Sample(input="Say ho.", target="ho")], solver=generate(), scorer=match())
