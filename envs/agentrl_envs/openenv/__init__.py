"""Environments behind an OpenEnv server. The environment `openenv`."""
