"""`Json`: the one type of values whose shape their author knows: task data, arguments, schemas, recipes.

What reads and writes the files of a run takes `dumps` and `loads` from here, before any plugin is imported: what a
plugin makes of those of `json` does not reach it.
"""

from json import dumps as dumps
from json import loads as loads
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""What JSON can hold: None, bool, int, float, str, lists, and dicts by text. Of this type are task data, hooks' keyword
arguments, arguments of tools and JSON schemas. It is an alias of Any: an author knows the shape of his own data. With
the recursive union of these types, `mypy --strict` finds 154 errors in 39 files, each of which needs a cast or a check
where a field is read. What is not JSON is refused at run time.
"""
