"""Lines as ranks write them, for a run of two ranks and one layer."""


def step_lines(step, loads, *, seconds=0.01, domain="prose"):
    """One `step` line per rank; loads: tokens of each rank in the single layer."""
    return [
        {
            "kind": "step",
            "rank": rank,
            "unix": float(step),
            "step": step,
            "seconds": seconds,
            "domain": domain,
            "rank_load": [load],
            "compute_s": [load * 1e-3],
            "paced_s": [load * 1e-3],
            "mismatches": 0,
        }
        for rank, load in enumerate(loads)
    ]


def swap_line(rank, step, plan_id):
    return {"kind": "swap", "rank": rank, "step": step, "plan_id": plan_id, "seconds": 0.001}


def check_line(rank, **changes):
    return {
        "kind": "check",
        "rank": rank,
        "ok": True,
        "problems": [],
        "epochs_agree": True,
        "maps_agree": True,
        "slots_checked": 10,
        "wrong_slots": [],
        "rows_checked": 1000,
        "mismatches": 0,
        **changes,
    }


def exit_line(rank, code=0, reason="finished", detail=""):
    return {"kind": "exit", "rank": rank, "code": code, "reason": reason, "detail": detail}


def plan(plan_id, created_at, reason="balance_below_threshold", **changes):
    return {
        "plan_id": plan_id,
        "kind": "automatic",
        "phase": "committed",
        "planned_because": reason,
        "created_at": created_at,
        "waves": 1,
        "waves_committed": 1,
        "moves": 3,
        "nbytes": 300_000,
        **changes,
    }


def good_run():
    """Lines of a run that keeps every promise: plan at 20, shift at 40, plan at 60, 80 steps."""
    lines = []
    for step in range(80):
        balanced = 20 <= step < 40 or step >= 60
        domain = "prose" if step < 40 else "code"
        seconds = 0.03 if step in (18, 58) else 0.01
        lines += step_lines(step, (8, 8) if balanced else (12, 4), seconds=seconds, domain=domain)
        if step in (19, 59):
            name = "p1" if step == 19 else "p2"
            lines += [swap_line(rank, step, name) for rank in range(2)]
    lines += [check_line(rank) for rank in range(2)]
    return lines + [exit_line(rank) for rank in range(2)]


PLANS = [plan("p2", 55.5, "load_changed"), plan("p1", 15.5)]
