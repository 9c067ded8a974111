"""Hold the parts of a worker that need torch, and import torch when they are used."""
