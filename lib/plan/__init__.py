"""What is known of a run before it starts: plans, sums and other programs' settings. Torch-free."""
