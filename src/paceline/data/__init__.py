"""From a source of labelled samples to encoded arrays, and from these to batches."""
