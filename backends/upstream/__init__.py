"""Clients that carry one HTTP request to a worker."""
