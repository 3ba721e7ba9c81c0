"""Sampling from SGLang servers: launched by us or already running, one or many."""
