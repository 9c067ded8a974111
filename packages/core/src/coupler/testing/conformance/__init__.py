"""Define what every backend must do, as tests that a plugin's author runs."""
