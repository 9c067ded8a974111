"""The configuration of a run: its schema, how it is composed, explained and watched."""
