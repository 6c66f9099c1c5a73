"""The pipeline's stages: thin click commands over lib, run as `python -m stages.NAME`."""
