"""Adapters to Redis, gRPC, torch, Prometheus and the operating system: one per module."""
