"""Text environments of Gymnasium, in an interpreter that has it."""

from typing import Any

import gymnasium
from gymnasium import spaces


class Riddle(gymnasium.Env):
    """Words are answered by words."""

    observation_space = spaces.Text(200)
    action_space = spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz0123456789")

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(10))
        return f"Say {self._number} in digits.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == str(self._number)
        return ("yes" if right else "no"), float(right), right, False, {}


class Rooms(gymnasium.Env):
    """Observations and actions with parts."""

    observation_space = spaces.Dict({"room": spaces.Text(20), "gold": spaces.Discrete(10)})
    action_space = spaces.Dict({"way": spaces.Discrete(2), "shout": spaces.Text(20)})

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._at = 0
        return self._seen(), {}

    def _seen(self) -> dict[str, Any]:
        return {"room": ("hall", "cellar", "vault")[self._at], "gold": self._at}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._at = max(0, self._at + (1 if action["way"] else -1))
        return self._seen(), 0.5 if action["way"] else 0.0, self._at == 2, False, {}
