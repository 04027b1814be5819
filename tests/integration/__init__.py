"""Tests of the whole gateway over real sockets."""
