"""The tensor work of one rank of several: FSDP2 holds a shard of the weights, gradients and optimizer on each.

`mesh.py` says which rank is where, `build.py` makes a sharded model without any rank holding it whole, `source.py` is
where rank 0 has the weights from, `scatter.py` deals them out, `shard.py` applies FSDP2 to a computation, `choose.py`
finds out which computation is exact. Every function here is called by every rank, in the same order.
"""
