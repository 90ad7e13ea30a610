"""``paceline report``: a run's report.html, written again from what its folder holds."""
