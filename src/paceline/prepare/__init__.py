"""From a recipe to data, model and build, and the steps that a run takes."""
