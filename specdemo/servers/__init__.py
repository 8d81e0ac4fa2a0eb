"""Lanes on servers: allowed addresses, requests, checked responses, and server processes."""
