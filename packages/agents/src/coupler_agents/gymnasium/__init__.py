"""Play text environments of the gymnasium API."""
