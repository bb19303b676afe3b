"""Seats of trainers that speak HTTP: each is one trainer of the gRPC contract."""
