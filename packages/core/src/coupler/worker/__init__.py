"""Host one backend in the process of an engine rank or of a rollout replica."""
