"""The interface for engine authors: what it offers is pinned, and a change is a new version."""

import inspect

import evenkeel_moe.agent as agent

NAMES = {
    "API_VERSION",
    "Agent",
    "AgentConfig",
    "ClockReader",
    "Communicator",
    "CountingSide",
    "DeploymentId",
    "DeviceClock",
    "DeviceRecorder",
    "EngineMoves",
    "EpRank",
    "ExpertWeights",
    "GateFailed",
    "Generation",
    "GrpcRankLink",
    "HostEngine",
    "KvCache",
    "Lineage",
    "LinkListener",
    "LoraOnExperts",
    "MapInstaller",
    "ModelShape",
    "Move",
    "NvmlClock",
    "Phase",
    "Placement",
    "Probe",
    "RankIdentity",
    "RankLink",
    "SlotsWritten",
    "SwapRecord",
    "WeightTransport",
    "canary_token",
    "make_communicator",
}


def test_version_one_offers_these_names():
    assert agent.API_VERSION == 1
    assert set(agent.__all__) == NAMES
    assert all(hasattr(agent, name) for name in NAMES)


def test_version_one_takes_these_arguments():
    record = list(inspect.signature(agent.Agent.record).parameters)
    assert record == ["self", "step", "counts", "epoch", "tokens", "phase", "dummy", "compute_s"]
    made = list(inspect.signature(agent.Agent).parameters)
    assert made == [
        "config",
        "placement",
        "epoch",
        "weights",
        "maps",
        "connect",
        "device",
        "link",
        "on_swap",
        "on_progress",
        "clock",
        "slots_written",
        "probe",
    ]
    on_device = list(inspect.signature(agent.DeviceRecorder.record).parameters)
    assert on_device == [*record, "phy2log"]
    boundary = inspect.signature(agent.Agent.step_boundary).parameters
    assert list(boundary) == ["self", "step"] and boundary["step"].default is None
