"""Many workers behind one object: a Ray session, pools of resources, groups of SPMD workers, and what their faults say.

Nothing here knows of training, and nothing outside imports it unless a recipe asks for a cluster.
"""
