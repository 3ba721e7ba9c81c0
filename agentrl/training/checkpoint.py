"""Checkpoints: `step_N/` is written aside, flushed, then renamed, so what bears its name is whole.

A folder is a Hugging Face model (weights, tokenizer, chat template) with the trainer's state in `trainer/`.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as progress

from agentrl.errors import UserError
from agentrl.models import lora

ADAPTER = "adapter"
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk; `path` is a folder that `transformers` loads."""

    step: int
    path: Path

    def load_into(self, actor: Any) -> dict[str, Any]:
        """Restore the optimizer and the random state of `actor`, whose model was loaded from `path`. Returns `extra`.

        Raises UserError when the trainer's state is missing or of another model.
        """
        folder = self.path / "trainer"
        try:
            state = torch.load(folder / "actor.pt", map_location="cpu", weights_only=True)
            extra: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            actor.load_state_dict(state)
        except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
            line = str(error).strip().partition("\n")[0]
            raise UserError(f"{self.path}: the trainer's state cannot be restored: {line}") from error
        return extra


class Checkpoints:
    """Those of one run, in `folder`; the last `keep` are kept. `tokenizer` is saved with each."""

    def __init__(self, folder: str | Path, keep: int, tokenizer: Any = None) -> None:
        self.folder, self.keep, self.tokenizer = Path(folder), keep, tokenizer

    def latest(self) -> Saved | None:
        self._sweep()
        return max(self._all(), key=lambda saved: saved.step, default=None)

    def save(self, step: int, actor: Any, extra: Mapping[str, Any]) -> Saved:
        """Write `step_<step>` with the actor's model and state, and `extra` (JSON), then drop the oldest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        aside, final = self.folder / f".step_{step}.part", self.folder / f"step_{step}"
        save_model(actor.model, self.tokenizer, aside)
        trainer = aside / "trainer"
        trainer.mkdir()
        torch.save(actor.state_dict(), trainer / "actor.pt")
        (trainer / "state.json").write_text(json.dumps(extra), encoding="utf-8")
        _flush(aside)
        if final.exists():
            final.rename(self.folder / f".step_{step}.old")
        aside.rename(final)
        _flush_folder(self.folder)
        self._sweep()
        for saved in sorted(self._all(), key=lambda s: s.step)[: -self.keep]:
            _remove(saved.path)
        return Saved(step, final)

    def _all(self) -> list[Saved]:
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(entry.name), entry) for entry in self.folder.iterdir() if entry.is_dir()]
        return [Saved(int(match[1]), entry) for match, entry in found if match]

    def _sweep(self) -> None:
        """Remove what a killed run left half done. A folder set aside whose successor never came is put back."""
        for entry in self.folder.glob(".step_*"):
            whole = self.folder / entry.name[1:].removesuffix(".old")
            if entry.suffix == ".old" and not whole.exists():
                entry.rename(whole)
            else:
                shutil.rmtree(entry)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder that `from_pretrained` loads: config.json, model.safetensors in the model's dtype, the tokenizer.

    An adapter is merged into the weights; by itself it lies in `adapter/`, in peft's format.
    """
    progress.disable_progress_bar()
    if lora.layers(model):
        model.save_pretrained(folder, state_dict=lora.merged_state(model))
        lora.save_adapter(model, folder / ADAPTER)
    else:
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _remove(folder: Path) -> None:
    """Take the name away first: a kill while files go must not leave a folder that looks whole."""
    gone = folder.with_name(f".{folder.name}.part")
    folder.rename(gone)
    shutil.rmtree(gone)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
