"""The environment `random_tools`: tools that were never seen, in worlds made for one task each."""
