"""Train on environments of the verifiers library."""
