"""Launching, the training loop, metrics and signals."""
