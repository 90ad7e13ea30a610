"""Any number of labels a sample."""
