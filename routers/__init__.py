"""Routing: the fleet, the load that is booked on it, and the policies that choose."""
