"""The report of a run: one inert HTML file, built from the run folder alone."""
