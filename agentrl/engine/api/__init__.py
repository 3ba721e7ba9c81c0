"""The engine `openai`: a model behind an OpenAI-compatible endpoint, for evaluation."""
