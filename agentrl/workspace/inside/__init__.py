"""Modules that keep workspaces: scripts of the standard library, run apart from the trainer."""
