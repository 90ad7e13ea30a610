"""The machine that a run is on: its GPUs, its processes and what is installed."""
