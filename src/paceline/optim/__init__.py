"""Gradients, optimizers and schedules."""
