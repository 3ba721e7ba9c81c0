"""Sampling from vLLM servers: launched by us or already running, one or many."""
