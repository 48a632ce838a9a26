"""Measures one MoE layer on a device: its time by tokens, and by tokens and active replicas."""
