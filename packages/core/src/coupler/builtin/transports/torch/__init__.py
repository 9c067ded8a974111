"""Transports of torch tensors. Torch is imported when one of them is used."""
