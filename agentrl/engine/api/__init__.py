"""The engine `openai`: a model at an OpenAI-compatible endpoint, for evaluation."""
