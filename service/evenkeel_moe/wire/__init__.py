"""Encodes and decodes every message of a rank's stream, in both directions, without I/O.

Encoding trusts our own values. Decoding takes what a remote party sent: a message that cannot be
right raises PeerViolation with the numbers, and no other error.
"""
