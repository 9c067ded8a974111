"""Hold everything of vLLM that is no documented interface, one file for each process.

``version`` is for the process that starts vLLM, ``engine`` for the rollout's process,
``scheduler`` for that of vLLM's scheduler, ``worker`` and ``memory`` for its model
workers.

Importing these files imports no vLLM: its modules are imported in the functions that
use them. vLLM changes the environment when it is imported, and reads it then, too.
"""

ADAPTER = 1  # The id of an engine's only adapter: requests and model workers name it.
