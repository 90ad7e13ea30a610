"""Techniques: one public entry point each, a plain function that also works in somebody else's loop."""
