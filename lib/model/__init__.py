"""The transformer, its initialisation and its arithmetic."""
