"""The pipeline as a whole: what each stage depends on, and running it in a scratch copy."""
