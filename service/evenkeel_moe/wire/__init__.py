"""Codecs between the model and protobuf, without I/O."""
