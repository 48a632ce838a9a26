"""The real vLLM on a CPU, with the plugin, under a real controller: `make test-vllm`."""
