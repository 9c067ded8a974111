"""Run in bubblewrap, and start there one interpreter per program or episode.

Nothing here imports core or another folder of this package. The parent process of all
interpreters imports it once, and every interpreter is a fork of that process.
"""
