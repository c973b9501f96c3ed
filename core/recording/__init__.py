"""What entered an engine and what it decided, step by step: for reports, for a file, to be run again elsewhere."""
