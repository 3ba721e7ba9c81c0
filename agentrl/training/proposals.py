"""`Proposals`: configurations of a sweep that Optuna proposes, from what the ones before came to."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.training.axes import Range, split_keys

JOURNAL = "optuna.log"


def check_installed() -> None:
    """Raise UserError where Optuna cannot be imported."""
    try:
        import_module("optuna.storages.journal")
    except ImportError as error:
        raise UserError(f"--optuna: {error}; pip install 'agentrl[sweep]'") from error


class Proposals:
    """An Optuna study in the folder of a sweep, whose trials are its configurations in their order."""

    def __init__(self, folder: Path, axes: Mapping[str, str]) -> None:
        """axes: key -> values or range, as they were given. Raises UserError: Optuna is not installed."""
        check_installed()
        self._optuna: Any = import_module("optuna")
        journal: Any = import_module("optuna.storages.journal")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        storage = self._optuna.storages.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
        self._study: Any = self._optuna.create_study(
            storage=storage, study_name="sweep", direction="maximize", load_if_exists=True
        )
        # one seed for all would have a sweep that goes on draw what it drew before
        self._study.sampler = self._optuna.samplers.TPESampler(seed=len(self._study.trials))
        self._axes = split_keys([f"{key}={told}" for key, told in axes.items()])[1]
        self._file = folder / JOURNAL

    def ask(self) -> list[str]:
        """The values of a new configuration."""
        found = []
        trial = self._study.ask()
        for key, axis in self._axes.items():
            if not isinstance(axis, Range):
                found.append(trial.suggest_categorical(key, list(axis)))
            elif axis.whole:
                found.append(trial.suggest_int(key, int(axis.low), int(axis.high), log=axis.logarithmic))
            else:
                found.append(trial.suggest_float(key, axis.low, axis.high, log=axis.logarithmic))
        return [_text(value) for value in found]

    def known(self) -> list[list[str]]:
        """The values of all configurations that were proposed. Raises UserError: a kill left one incomplete."""
        found = []
        for trial in self._study.trials:
            if trial.params.keys() != self._axes.keys():
                raise UserError(f"{self._file}: proposal {trial.number + 1} is incomplete; start a new sweep")
            found.append([_text(trial.params[key]) for key in self._axes])
        return found

    def told(self, index: int) -> bool:
        """Whether a configuration's outcome is known to the study."""
        trials = self._study.trials
        return index < len(trials) and trials[index].state.is_finished()

    def tell(self, index: int, score: float | None) -> None:
        """Tell what a configuration came to; None: a run of it failed."""
        failed = self._optuna.trial.TrialState.FAIL
        if score is None:
            self._study.tell(index, state=failed)
        else:
            self._study.tell(index, score)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
