"""Evenkeel beside SGLang: a plugin that reports loads and gives SGLang's own EPLB manager the controller's plans."""
