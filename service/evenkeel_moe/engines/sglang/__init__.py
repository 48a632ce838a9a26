"""The SGLang plugin: reports loads, and gives SGLang's own EPLB manager the controller's plans."""
