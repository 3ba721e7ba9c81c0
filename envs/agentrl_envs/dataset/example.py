"""A few rows, by which `agentrl try dataset` shows what the environment does with data."""

ROWS = {
    "train": (("What is 12 * 7?", "84"), ("Which is larger, 0.9 or 0.11?", "0.9")),
    "test": (("What is 15 - 8?", "7"),),
}


def rows(split: str) -> list[dict[str, str]]:
    """The rows of `train` or `test`: a prompt, and what is right."""
    return [{"prompt": prompt, "answer": answer} for prompt, answer in ROWS[split]]
