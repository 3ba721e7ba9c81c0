"""`agentrl doctor`: each part of a run tried for real, small, on this machine.

`checks.py` lists the checks. `examine.py` has them run, one after another, in processes of its own, so that one that
crashes or hangs ends no other; `child.py` is what runs there.
"""
