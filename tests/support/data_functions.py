"""What the data tests name by import path: sources, maps and filters."""

from collections.abc import Iterator
from typing import Any


def rows(split: str) -> list[dict[str, Any]]:
    size = {"train": 5, "test": 2}[split]
    return [{"prompt": f"{split} {n}", "answer": str(n)} for n in range(size)]


def stream(split: str) -> Iterator[dict[str, Any]]:
    yield from rows(split)


def nothing(split: str) -> None:
    return None


def no_rows(split: str) -> list[Any]:
    return []


def shout(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["prompt"].upper(), "length": len(row["prompt"])}


def even(row: dict[str, Any]) -> bool:
    return int(row["answer"]) % 2 == 0


def long(row: dict[str, Any]) -> bool:
    return row["length"] > 10


def never(row: dict[str, Any]) -> bool:
    return False


def broken(row: dict[str, Any]) -> dict[str, Any]:
    return {"half": 1 / (int(row["answer"]) - 3)}


def text(row: dict[str, Any]) -> Any:
    return "text"
