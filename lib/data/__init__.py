"""From raw text to the sample a rank trains on. Torch-free."""
