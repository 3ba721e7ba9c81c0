"""Repair functions of real packages that were broken, judged by hidden calls: the environment `swe`."""
