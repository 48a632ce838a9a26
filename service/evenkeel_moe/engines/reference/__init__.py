"""A small real expert-parallel engine, for tests, the demo, and as an example.

`config` describes a run and the files it writes, `supervisor` starts, restarts and resizes the
ranks, `rank` is one rank process, and `group` what it has of one group. It is not for production
serving.

When the number of ranks changes, each process that stays keeps its experts in memory, its requests
and their KV cache. Only the process group is formed again: communicators, map and agent.

1. `Supervisor.resize` refuses what cannot be, writes the configuration of the next group, and
   starts the processes that join. They load. Ranks that retire take no more requests and serve
   those that they have. Giving up until now leaves the old group whole.
2. The supervisor marks the configuration as `forming`. Each rank looks at the file before each
   step, and asks all ranks to stop in the exchange of that step. So all end the same step, and
   compare their maps.
3. Who stays closes its agent, saves the new placement, and meets the others at the rendezvous of
   the next group. Who joins gets placement, epoch and step from rank 0. Who retires checks its
   weights and ends.
"""
