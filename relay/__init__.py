"""The process beside an engine node that brings the node's KV events to gateways."""
