"""One compute thread, as in a rank, because thread pools of tests would compete for the cores."""

import torch

torch.set_num_threads(1)
