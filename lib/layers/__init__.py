"""Parallel layers: linear, embedding, norms, rotary, attention, loss."""
