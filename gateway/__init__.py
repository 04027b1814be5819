"""The gateway: HTTP edge, the one request path, and what operators look at."""
