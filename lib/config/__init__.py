"""Typed, frozen parameters, their rules, and the run configuration. Torch-free."""
