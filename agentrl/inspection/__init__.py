"""Reading runs, without importing anyone's environment."""
