"""HTTP: OpenAI's API first, the native `/generate`, health and metrics.

A request's way: `connection` (number, silence, size of the head) -> `middleware` (key, limits, id) -> `app` (route)
-> `chat`, `completions` or `native` (what is asked) -> `validate` (what the engine takes) -> `generation` (engine
requests) -> `answer`, `wire`, `stream` (the answer). What may take long on this way is done in `threads`.
"""
