"""One Ray actor per engine rank and rollout replica. Ray is imported when it is used."""
