"""The algorithm of a step, on the controller. Knows no file and no backend."""
