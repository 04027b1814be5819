"""FastAPI routes of everything that is not the data plane."""
