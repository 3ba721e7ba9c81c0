"""The tensor work of one rank of several: FSDP2 holds a shard of the weights, gradients and optimizer on each.

`build.py` builds the model of each role from a recipe, by `role.py`, without any rank holding it whole; `mesh.py` says
which rank is where, `scatter.py` reads the weights and sends each rank its shards, `shard.py` applies FSDP2 to a
computation, `choose.py` finds out which computation is exact. All ranks call every function, in the same order.
"""
