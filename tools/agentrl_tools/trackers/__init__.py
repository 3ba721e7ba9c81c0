"""The trackers that ship: entry points of `agentrl.trackers`, each a plugin like anybody's."""
