"""HTTP: OpenAI's API first, the native `/generate`, health and metrics.

A request's way: `middleware` (key, limits, id) -> `app` (route) -> `chat`, `completions` or `native` (what is asked)
-> `validate` (what the engine takes) -> `generation` (engine requests) -> `wire`, `stream` (the answer).
"""
