"""The folder of a run, and its life over several starts."""
