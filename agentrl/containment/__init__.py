"""What keeps strangers' programs in bounds: the sandbox of agents and of the tool `python`, by bubblewrap."""
