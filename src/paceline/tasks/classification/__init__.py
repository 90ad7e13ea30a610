"""One label a sample."""
