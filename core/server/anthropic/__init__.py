"""Anthropic's `/v1/messages`: another form of the conversation that chat holds."""
