"""Many workers behind one object: a Ray session, pools of resources, groups of SPMD workers, and their errors.

This package knows nothing of training, and is imported only if a recipe asks for a cluster.
"""
