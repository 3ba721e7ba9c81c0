"""The reward functions that ship: entry points of `agentrl.rewards`, each a plugin like anybody's."""
