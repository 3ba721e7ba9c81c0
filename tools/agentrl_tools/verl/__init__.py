"""Tools written against verl's `BaseTool`, unchanged."""
