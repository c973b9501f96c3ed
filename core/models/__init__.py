"""Model definitions: pure functions over `Ops`, one per architecture, for every platform."""
