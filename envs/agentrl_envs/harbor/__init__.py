"""Harbor's task folders, as an environment."""
