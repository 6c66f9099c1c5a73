"""Atomic checkpoints, resume rules, published models and Hugging Face names."""
