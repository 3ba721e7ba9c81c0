"""`start`: what the model is taught before reinforcement learning."""

from pydantic import model_validator

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import Section


class StartSection(Section):
    """Teach the model before reinforcement learning, in the same run; name one of the keys. How it is taught says the
    section `sft` where there is one, else what suits the model's size. `start: demonstrations` is short."""

    demonstrations: bool | str = False
    """The environment's demonstrations, true or the name of a style. With `sft.new_model`, a model that is made from
    nothing learns them, in place of `model.path`."""
    conversations: str | None = None
    """Conversations, as in sft.source: a .jsonl or .parquet file, a folder of them, a hub name, module:function."""
    run: str | None = None
    """The solved samples of a run, of `agentrl rollout` or of an evaluation: its folder."""

    @model_validator(mode="after")
    def _one(self) -> "StartSection":
        given = [name for name, value in self if value]
        if len(given) != 1:
            said = f"not {' and '.join(given)}" if given else "such as `start: demonstrations`"
            raise ValueError(f"start takes one of demonstrations, conversations and run, {said}")
        return self

    @property
    def style(self) -> str:
        """The style of its demonstrations."""
        return self.demonstrations if isinstance(self.demonstrations, str) else "clean"

    @property
    def source(self) -> str | None:
        """Where its conversations are, in the words of sft.source; None: demonstrations."""
        return self.conversations or self.run

    def __str__(self) -> str:
        if self.run is not None:
            return f"solved samples of {self.run}"
        return self.conversations or f"demonstrations ({self.style})"


def started(value: Json) -> Json:
    """A mapping for the word `demonstrations` alone, which is short for it."""
    return {"demonstrations": True} if value == "demonstrations" else value
