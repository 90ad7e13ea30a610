"""What is promised of a run, tried on a person's own model, data and recipe: one room a claim, or a few that belong
together. ``claims.py`` lists them; ``checking.py`` goes through them."""
