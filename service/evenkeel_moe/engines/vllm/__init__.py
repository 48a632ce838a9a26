"""Evenkeel beside vLLM: a general plugin that reports loads and gives vLLM's own balancer the controller's plans."""
