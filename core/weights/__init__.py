"""Checkpoints on disk, read without any framework, and where models come from."""
from .checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
