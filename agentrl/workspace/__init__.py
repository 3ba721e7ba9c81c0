"""A file system and processes of one rollout, which tools, environments, graders and agents share."""
