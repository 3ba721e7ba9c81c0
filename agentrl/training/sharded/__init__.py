"""The tensor work of one rank of several: FSDP2 holds a shard of the weights, gradients and optimizer on each.

`mesh.py` says which rank is where, `build.py` makes a sharded model without any rank holding it whole (but rank 0, on
its CPU), `shard.py` applies FSDP2 to a computation, `scatter.py` deals tensors out. Every function here is called by
every rank, in the same order.
"""
