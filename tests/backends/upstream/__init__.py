"""Tests of: The upstream client."""
