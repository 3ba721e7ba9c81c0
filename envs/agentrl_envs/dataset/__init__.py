"""People's own data and a reward, without a class of their own: the environment `dataset`."""
