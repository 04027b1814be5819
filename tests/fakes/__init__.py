"""What tests put in the place of the outside world."""
