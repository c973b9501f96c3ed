"""Parsers of replies: what a model writes, split into content, reasoning and tool calls while it comes."""

# In which order templates are asked: what is more special comes first, as many notations share "<tool_call>".
CALL_ORDER = ("harmony", "gemma4", "functiongemma", "deepseek-dsml", "minimax", "deepseek", "deepseek-v31", "kimi",
              "mistral", "mistral-list", "cohere", "glm", "qwen3-coder", "functionary", "phi4", "apertus", "hermes",
              "pythonic", "llama3-json")
THINKING_ORDER = ("harmony", "gemma4", "mistral", "cohere", "apertus", "think")
NOT_ASKED = ("json",)  # a notation that no template gives away
