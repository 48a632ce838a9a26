"""The vLLM plugin: reports loads, and gives vLLM's own balancer the controller's plans."""
