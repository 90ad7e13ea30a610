"""Who watches a run: the console, metrics.jsonl, TensorBoard. Observers receive records and hold nothing else."""
