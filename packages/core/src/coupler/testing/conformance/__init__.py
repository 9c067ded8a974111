"""What every backend must do: ``pytest --pyargs coupler.testing.conformance --coupler engine=NAME``."""
