"""One compute thread, as in a rank: a pool per test would only fight over the cores."""

import torch

torch.set_num_threads(1)
