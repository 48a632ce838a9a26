"""Weight transport over torch.distributed."""
