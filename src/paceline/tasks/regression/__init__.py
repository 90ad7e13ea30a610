"""A number a sample."""
