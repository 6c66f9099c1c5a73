"""Fused operations, one file each: math, Triton forward and backward, reference.

This file imports nothing and carries a version because other packages probe for a module of this
name and read its version.
"""

__version__ = "0.0.0"
