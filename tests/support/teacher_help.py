"""What a teacher behind HTTP has to say of the embedded model, whose weights it has."""

from typing import Any

import numpy as np
import torch

from agentrl.compute.batch import Batch
from agentrl.learner.teacher_server import TeacherServer
from agentrl.recipe.sections.algorithm import TeacherSection


def sampled_batch(tokenizer: Any) -> Batch:
    """Three samples of made-up answers after prompts; the second has two turns with a tool's answer in between."""
    texts = [("Ann has 3 apples.", " 3 + 4 = 7"), ("Who eats 12?", " Bob, and 5 more"), ("Two", " 2")]
    ids, mask = [], []
    for number, (prompt, answer) in enumerate(texts):
        first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
        row = [0] * len(first) + [1] * len(last)
        if number == 1:
            row[len(first) + 2] = 0
        ids.append(np.array(first + last, np.int32))
        mask.append(np.array(row, np.uint8))
    return Batch(
        np.cumsum([0, *map(len, ids)]).astype(np.int64),
        {"ids": np.concatenate(ids), "loss_mask": np.concatenate(mask)},
        {"prompt_length": np.array([int(row.argmax()) for row in mask], np.int32), "group": np.arange(3)},
    )


def check_teacher(parts: tuple[Any, Any], **section: Any) -> None:
    """Its log-probs of sampled tokens, and by `form: top_k` of the likeliest, are those of the model in `parts`."""
    model, tokenizer = parts
    batch, made = sampled_batch(tokenizer), TeacherSection.model_validate(section)
    found = TeacherServer(made, tokenizer).columns(batch).tokens
    for index in range(len(batch)):
        span = batch.span(index)
        ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
        at = np.flatnonzero(batch.tokens["loss_mask"][span])
        with torch.no_grad():
            log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)[at - 1]
        own = log_p.gather(1, ids[at][:, None])[:, 0]
        column = found["teacher_logprobs"][span]
        np.testing.assert_allclose(column[at], own, atol=1e-3)
        assert np.count_nonzero(column) <= len(at)
        if made.compared == "top_k":
            top = log_p.topk(made.top_k)
            np.testing.assert_allclose(found["teacher_top"][span][at], top.values, atol=1e-3)
            theirs = log_p.gather(1, torch.from_numpy(found["teacher_ids"][span][at]))
            np.testing.assert_allclose(theirs, top.values, atol=1e-3)
