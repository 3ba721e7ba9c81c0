"""Adapters of known sources: each runs in the interpreter of its source, and imports that and the standard library.

docs/foreign.md says what an adapter is; each is found by the name of its file.
"""
