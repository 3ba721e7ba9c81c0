"""Environments of others, unchanged, each in an interpreter of its own."""
