"""A customer who leaves out what matters and must be asked: the environment `user_sim`."""
