"""What runs in the interpreter of the environment: the standard library alone, Python 3.10 or later."""
