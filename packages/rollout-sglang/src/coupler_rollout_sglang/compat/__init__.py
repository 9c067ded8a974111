"""Hold everything of SGLang that is no documented interface, one file for each process.

``version`` is for every process, ``engine`` for the one that starts SGLang and holds
its tokenizer manager, ``worker`` for its schedulers, which are its model workers.

Importing these files imports no SGLang: its modules are imported in the functions that
use them. SGLang reads the environment when it is imported.
"""
