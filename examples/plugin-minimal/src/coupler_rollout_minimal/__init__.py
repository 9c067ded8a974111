"""``rollout=minimal``: see the README."""
