"""A simulated engine without a GPU that speaks the engines' HTTP interfaces."""
