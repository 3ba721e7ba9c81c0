"""Providers of workspaces, one a file."""
