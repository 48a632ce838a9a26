"""What the fork server loads once, for all processes that it forks."""

import gc
import importlib
import threading

from evenkeel_moe.controller.process import kernel_warmup
from evenkeel_moe.planning.policies import registry

importlib.import_module("evenkeel_moe.engines.reference.rank")
registry.warm_kernels()
kernel_warmup.warm_kernels()
assert threading.active_count() == 1, "a fork copies one thread, and the locks of all"
gc.collect()
gc.freeze()
