"""The processes of a run: how they find one another, and what they tell each other."""
