"""Small helpers over the operating system and Python. Knows nothing of training."""
