"""A vLLM server under a real controller, and what must hold whatever was moved."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from tests.integration.whole import DEPLOYMENT, EAGER, Served
from tests.vllm.checkpoint import EXPERTS
from tests.vllm.server import Answer, Slots, Traffic, VllmServer

UNEVEN = [
    [2 + (number * 31 + place * 7) % 510 for place in range(length)]
    for number, length in enumerate((8, 450, 16, 240, 60, 30, 120) * 4)
]
"""Prompts of very different lengths: only tokens that vary tell what a token costs."""
FRESH = "fresh"
"""The weights that the server started with; else the name of the checkpoint loaded last."""


@dataclass
class Reference:
    """What an engine without the plugin answers and holds, which never moved an expert.

    On a CPU, vLLM answers otherwise after `reload_weights` than after a fresh start from the same
    checkpoint, so both are kept.
    """

    prompts: list[list[int]]
    tokens: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """Weights -> the greedy tokens of each prompt."""
    digests: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict)
    """Weights -> (layer, expert) -> digest of its bytes in a slot."""

    def read(self, server: VllmServer, weights: str) -> None:
        """Ask the engine that never moves an expert."""
        self.tokens[weights] = server.greedy(self.prompts)
        self.digests[weights] = {}
        for layer, expert, digest in _rows(server.slots()):
            known = self.digests[weights].setdefault((layer, expert), digest)
            assert known == digest, "two replicas differ"

    def check_answers(self, answers: Sequence[Answer], *weights: str) -> None:
        """Compare each answer with those to the same prompt; one of the weights must fit."""
        wrong = [
            answer
            for answer in answers
            if all(answer.tokens != self.tokens[name][answer.prompt] for name in weights)
        ]
        assert not wrong, f"{len(wrong)} of {len(answers)} answers are wrong: {wrong[0]}"


@dataclass
class Rig:
    """The server, its controller, and the weights that it has now."""

    served: Served
    server: VllmServer
    reference: Reference
    weights: str = FRESH

    def check(self) -> None:
        """Compare tokens, slots and maps with the reference, each other and the controller."""
        self.wait_until_settled()
        answers = self.server.greedy(self.reference.prompts)
        assert answers == self.reference.tokens[self.weights]
        # In mode `observe` the steps of these answers may have moved experts.
        now = self.server.slots()
        for layer, expert, digest in _rows(now):
            assert digest == self.reference.digests[self.weights][layer, expert]
        experts = {(layer, expert) for layer, expert, _ in _rows(now)}
        assert experts == set(self.reference.digests[self.weights]), "every expert has a slot"
        self.check_trace()

        def controller_has_the_map():
            # 503 while it asks the ranks, after the engine has moved experts by itself.
            with suppress(httpx.HTTPStatusError):
                return self.served.get("/placement")["physical_to_logical"] == now.phy2log

        self.served.wait(controller_has_the_map, 30, "the controller to have the engine's map")
        status = self.served.get()
        assert {rank["epoch"] for rank in status["ranks"]} == {status["epoch"]}
        assert [rank["trouble"] for rank in status["ranks"]] == ["", ""]

    def check_trace(self) -> int:
        """Compare the maps of both ranks after every step; return the number of steps."""
        first, second = self.server.trace()
        steps = min(len(first), len(second))
        assert abs(len(first) - len(second)) <= 1, "a rank is a step ahead"
        assert first[:steps] == second[:steps]
        return steps

    def wait_until_settled(self) -> dict:
        def settled():
            status = self.served.status()
            if status is None or status["state"] != "ready" or not status["ranks"]:
                return None
            return status if status["active_plan"] is None else None

        return self.served.wait(settled, 120, "the plan to end")

    def move(self, seed: int) -> str:
        """Order a plan that gives every slot another expert; return its id."""
        rng = np.random.default_rng(seed)
        rows = self.served.get("/placement")["physical_to_logical"]
        # Experts trade names, so that no rank holds one of them twice. Empty slots stay so.
        target = [np.append(rng.permutation(EXPERTS), -1)[row].tolist() for row in rows]
        body = {"target": {"physical_to_logical": target}, "approve": True}
        answer = self.served.post("/plans", body)
        assert answer.status_code == 202, answer.text
        return answer.json()["plan_id"]

    def plan(self, plan_id: str) -> dict:
        return self.served.get(f"/plans/{plan_id}")

    def wait_until_ended(self, plan_id: str) -> dict:
        ended = ("committed", "aborted", "cancelled", "refused")

        def over():
            plan = self.plan(plan_id)
            return plan["phase"] in ended and plan

        return self.served.wait(over, 120, "the plan to end")

    def check_answers_of_moved(self, plan_ids: Sequence[str]) -> None:
        """Wait for what the moved experts of each plan answer, by its story; all as before."""
        for plan_id in plan_ids:
            row = self.answered(plan_id)
            # Those that a later plan moved before they were asked are neither.
        assert row["same"] > 0 == row["different"] == row["blind"], row

    def answered(self, plan_id: str) -> dict:
        """Wait until the moved experts of a plan were asked; return that row of its story."""

        def told():
            # An idle engine has no steps, between which experts are asked.
            self.server.greedy(self.reference.prompts[:1])
            rows = self.plan(plan_id)["story"]
            return next((row for row in rows if row["event"] == "answered"), None)

        return self.served.wait(told, 60, "the moved experts to be asked")

    def wait_until_committed(self, plan_id: str) -> dict:
        plan = self.wait_until_ended(plan_id)
        assert plan["phase"] == "committed", plan
        return plan

    def move_under_traffic(self, seed: int, *, updated: bool = False) -> None:
        """Carry out a plan while requests come, and check their answers.

        Args:
            updated: the weights were updated before. The controller learns of it within seconds,
                and until then refuses plans, which have to be ordered again.
        """

        def carried_out() -> bool:
            plan = self.wait_until_ended(self.move(seed))
            known = plan["reason"] != "weights_version_changed"
            assert plan["phase"] == "committed" or (updated and not known), plan
            return known

        with Traffic(self.server, self.reference.prompts) as traffic:
            self.served.wait(carried_out, 60, "a plan to be carried out")
        self.reference.check_answers(traffic.answers, self.weights)

    def wait_until_measured(self) -> dict:
        """Wait until the cost model in force is that of the ranks' own seconds."""

        def measured():
            status = self.served.status()
            cost = status and status["cost_model"]
            return status if cost and cost["source"] == "measured" else None

        return self.served.wait(measured, 60, "a cost model of the ranks' seconds")

    def wait_for_slowness(self, rank: int, least: float, most: float) -> float:
        """Wait until the time of a rank relative to the median rank is in a range."""

        def found():
            slowness = self.served.get()["ranks"][rank]["slowness"]
            return slowness is not None and least <= slowness <= most and slowness

        return self.served.wait(found, 60, f"rank {rank} to be {least} to {most} times as slow")

    def wait_until_moving(self, since: list[int]) -> None:
        """Wait until some layers have moved, but not all."""
        self.served.wait(lambda: self.server.layers_changed(since), 120, "the first layer")
        assert self.server.layers_changed(since) < len(since)


def _rows(slots: Slots) -> Iterator[tuple[int, int, str]]:
    """Yield layer, expert and digest of every slot that holds an expert."""
    for layer, (experts, digests) in enumerate(zip(slots.phy2log, slots.digests, strict=True)):
        for expert, digest in zip(experts, digests, strict=True):
            if expert >= 0:
                yield layer, expert, digest


def rank_settings(served: Served, mode: str, **more: str) -> dict[str, str]:
    """Return the settings of the plugin for a controller on this machine."""
    return {
        "CONTROLLERS": served.grpc_address,
        "DEPLOYMENT": DEPLOYMENT,
        "MODE": mode,
        "HOST": "127.0.0.1",
        "INTERFACE": "lo",
        "NODE": "n0",
        **more,
    }


@contextmanager
def started(
    folder: Path,
    checkpoint: Path,
    reference: Callable[[], Reference],
    parallel: Sequence[str],
    mode: str,
    **options,
) -> Iterator[Rig]:
    """Start a controller and a server; both are gone afterwards.

    Args:
        folder: an empty folder for their files.
        checkpoint: the model.
        reference: asked while the server starts.
        parallel: `TENSOR_PARALLEL` or `DATA_PARALLEL`.
        mode: of the ranks.
        options: of `VllmServer`.
    """
    served = Served(
        folder / "controller",
        WINDOW__STEPS=128,
        PLANNER__POLICY="keel",
        PLANNER__CYCLE_S=1,
        PLANNER__THRESHOLDS=json.dumps(EAGER),
    )
    server = VllmServer(
        folder / "engine", checkpoint, parallel, rank_settings(served, mode), **options
    )
    try:
        served.start()
        server.launch()
        rig = Rig(served, server, reference())
        server.wait_until_serving()
        # The first step writes the first line of the trace.
        server.greedy(rig.reference.prompts[:1])
        yield rig
        server = rig.server  # A test may have started another one.
    finally:
        server.stop()
        served.stop()
        served.http.close()
