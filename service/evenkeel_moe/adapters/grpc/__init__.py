"""The gRPC link between ranks and controller."""
