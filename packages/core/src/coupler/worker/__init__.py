"""What runs in the process of an engine rank or of a rollout replica."""
