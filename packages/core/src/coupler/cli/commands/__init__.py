"""Hold one module for each command of the table in ``cli/parser.py``.

A module has ``add_arguments``, for its parser, and ``run``, which returns the exit code
or None. It is imported only where its command is the one that was typed.
"""
