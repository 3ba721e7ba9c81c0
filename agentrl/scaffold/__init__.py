"""The files of a new plugin package; `agentrl new` fills in the name."""
