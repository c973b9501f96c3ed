"""OpenAI's `/v1/responses`: another form of the conversation that chat holds, with a store of what was answered."""
