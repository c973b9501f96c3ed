"""Triton kernels that several accelerators share. Not a platform: a platform chooses among them and tunes them.

Functions take torch tensors of one device and only launch: no host synchronization, no shape that depends on data.
"""
