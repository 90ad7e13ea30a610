"""Traces of a window of steps: recorded while a run goes on, read back as a time budget and a verdict."""
