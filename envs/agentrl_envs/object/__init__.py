"""Any Python object as an environment, TRL's too."""
