"""Programs that run in workspaces. They import the standard library alone."""
