"""Loss on held-out text and generated samples."""
