"""The sections of a recipe, each with its keys, their descriptions and its own checks."""
