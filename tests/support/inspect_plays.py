"""Inspect plays an environment of ours by a model that answers from a list: `python inspect_plays.py URL FILE ANSWERS`,
in an interpreter that has `inspect_ai`. Prints scores and messages of an evaluation for each list of answers, as JSON.
"""

import json
import os
import sys
import tempfile
from typing import Any

os.environ["INSPECT_DISPLAY"] = "none"
from inspect_ai import eval as evaluate
from inspect_ai.model import ModelOutput, ModelUsage, get_model

NAME = "mockllm/model"


def evaluated(url: str, file: str, answers: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """One sample. answers: a text, or a tool and its arguments."""
    outputs = [
        ModelOutput.for_tool_call(NAME, one["tool"], one["arguments"])
        if "tool" in one
        else ModelOutput.from_content(NAME, one["text"])
        for one in answers
    ]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else it counts, by the internet
    model = get_model(NAME, custom_outputs=outputs, memoize=False)
    (log,) = evaluate(f"{file}@agentrl", model=model, task_args={"url": url, "limit": 1}, log_dir=folder)
    sample = (log.samples or [None])[0]
    return {
        "status": log.status,
        "name": log.eval.task,
        "scores": {name: score.value for name, score in (sample.scores or {}).items()} if sample else {},
        "messages": [[message.role, message.text] for message in sample.messages] if sample else [],
        "metrics": sorted(log.results.scores[0].metrics) if log.results and log.results.scores else [],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as logs:
        print(json.dumps([evaluated(sys.argv[1], sys.argv[2], one, logs) for one in json.loads(sys.argv[3])]))
