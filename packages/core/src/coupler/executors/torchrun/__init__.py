"""The executor whose ranks live in processes that ``torchrun`` has started."""
