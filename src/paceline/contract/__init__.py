"""What every room may use: errors, records, spans, files. None of it loads torch."""
