"""Servicers: convert, one call on the hub, convert."""
