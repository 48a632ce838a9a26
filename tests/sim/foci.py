"""The foci of the simulation: which pairs each is about, its share of the seeds, its causes."""

from tests.sim.foci_leader import LEADER_FOCI
from tests.sim.foci_ranks import RANK_FOCI

FOCI = (*RANK_FOCI, *LEADER_FOCI)
