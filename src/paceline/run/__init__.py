"""A run from its recipe to its saved model."""
