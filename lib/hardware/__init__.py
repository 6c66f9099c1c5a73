"""What this machine can do, by trying it: the checks behind ``stages.check_hardware``."""
