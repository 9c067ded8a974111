"""One Ray actor per engine rank and rollout replica. Ray is imported on first use."""
