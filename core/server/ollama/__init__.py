"""Ollama's `/api/...`: its chat, its generate, and what its clients ask about the models that are there."""
