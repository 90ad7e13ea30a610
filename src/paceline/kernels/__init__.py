"""Operators of our own in torch's registry, each with a fake implementation: compile and plan see through them."""
