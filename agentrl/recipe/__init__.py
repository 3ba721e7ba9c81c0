from agentrl.recipe.schema import Recipe

__all__ = ["Recipe"]
