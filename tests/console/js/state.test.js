import assert from "node:assert/strict";
import test from "node:test";
import {
  colourOf,
  hottest,
  inkOn,
  paint,
  SCALE_STOPS,
} from "../../../service/evenkeel_moe/console/lib/colour.js";
import { gatesOf } from "../../../service/evenkeel_moe/console/lib/gates.js";
import {
  healthOf,
  rankCondition,
  worstFirst,
} from "../../../service/evenkeel_moe/console/lib/health.js";
import {
  columns,
  merge,
  pointOf,
  reasonCounts,
} from "../../../service/evenkeel_moe/console/lib/history.js";
import {
  changedLayers,
  movesBetween,
  planBehind,
  ranksOf,
  replicas,
  sameShape,
  slotLayout,
} from "../../../service/evenkeel_moe/console/lib/placement.js";

const POLICY = {
  mode: "auto",
  limits: { max_moves: 10, max_bytes: null, max_layers: null },
  schedule: { windows: [], blackouts: [] },
  thresholds: {
    plan_below: 0.9,
    cooldown_s: 8,
    min_window_steps: 64,
    max_data_age_s: 15,
    consecutive_windows: 2,
    min_gain: 0.002,
    max_payback_steps: 20000,
  },
};

function deployment(changes = {}) {
  return {
    deployment: "chat",
    state: "ready",
    reason: "committed",
    mode: "auto",
    leader: "a",
    shape: { num_ranks: 2 },
    ranks: [
      { rank: 0, fresh: true, trouble: "" },
      { rank: 1, fresh: true, trouble: "" },
    ],
    balancedness_mean: 0.95,
    time_balance: null,
    held: false,
    held_because: null,
    frozen_until_unix: null,
    active_plan: null,
    dispatch_warning: "",
    window_steps: 100,
    last_decision: {
      at: 1,
      reason: "balance_above_threshold",
      numbers: { balancedness_mean: 0.95 },
    },
    ...changes,
  };
}

const decided = (reason, numbers = {}) => ({ last_decision: { at: 1, reason, numbers } });
const statesOf = (row) => gatesOf(row, POLICY, 100).map((gate) => gate.state);

test("gates before the closed one are open, and those after it were not reached", () => {
  const gates = gatesOf(deployment(), POLICY, 100);
  const closed = gates.findIndex((gate) => gate.state === "closed");
  assert.equal(gates[closed].title, "Balance is low, or the traffic changed");
  assert.match(gates[closed].detail, /Balancedness 0.950; planning starts below 0.90/);
  assert.match(gates[closed].remedy, /below 0.90/);
  assert.ok(gates.slice(0, closed).every((gate) => gate.state === "open" && !gate.remedy));
  assert.ok(gates.slice(closed + 1).every((gate) => gate.state === "later"));
});

test("every gate is open when a plan was started, and unknown without a decision", () => {
  assert.deepEqual(new Set(statesOf(deployment(decided("plan_started")))), new Set(["open"]));
  assert.deepEqual(new Set(statesOf(deployment({ last_decision: null }))), new Set(["unknown"]));
  assert.deepEqual(new Set(statesOf(deployment(decided("brand_new")))), new Set(["unknown"]));
});

test("the gate of a waiting proposal says when it expires", () => {
  const row = deployment(decided("plan_proposed", { expires_in_s: 600 }));
  const gate = gatesOf(row, POLICY, 100).find((each) => each.state === "closed");
  assert.equal(gate.detail, "The proposal expires in 10 min.");
});

test("the gate of the hold says what the hold stops in each mode", () => {
  const held = { held: true, held_because: "held_after_rollback" };
  const gateOf = (row, mode) =>
    gatesOf(row, { ...POLICY, mode }, 100).find((gate) => gate.title.includes("hold"));
  const stopped = gateOf(deployment({ ...held, ...decided("held_after_rollback") }), "auto");
  assert.equal(stopped.state, "closed");
  assert.match(stopped.detail, /In mode auto no plan is made/);
  const passed = gateOf(deployment({ ...held, ...decided("plan_proposed") }), "propose");
  assert.equal(passed.state, "open");
  assert.match(passed.detail, /proposals are still made, and each waits for approval/);
  assert.match(gateOf(deployment(held), "observe").detail, /the controller starts nothing/);
  assert.equal(gateOf(deployment(), "auto").detail, "Automatic plans are not held.");
});

test("no title of a gate is a negation", () => {
  for (const { title } of gatesOf(deployment(), POLICY, 100)) {
    assert.doesNotMatch(title, /\b(no|not|none|never)\b/i);
  }
});

test("too few later steps close the gate of the gain, not the one of the window", () => {
  const row = deployment(decided("insufficient_data", { held_out_steps: 3 }));
  const gate = gatesOf(row, POLICY, 100).find((each) => each.state === "closed");
  assert.equal(gate.title, "The gain is large enough and certain");
  const early = gatesOf(deployment(decided("insufficient_data")), POLICY, 100);
  assert.equal(
    early.find((each) => each.state === "closed").title,
    "There are enough complete steps",
  );
});

test("limits and gains are told with what they are compared with", () => {
  const limit = gatesOf(deployment(decided("limit_exceeded", { copies: 12 })), POLICY, 100);
  assert.match(
    limit.find((gate) => gate.state === "closed").detail,
    /copies: 12, at most 10; bytes: no limit/,
  );
  const gain = gatesOf(
    deployment(decided("gain_too_small", { gain: 0.001, gain_lower: -0.1 })),
    POLICY,
    100,
  );
  assert.match(
    gain.find((gate) => gate.state === "closed").detail,
    /0.1 %, at least -10.0 %; needs 0.2 %/,
  );
  const frozen = gatesOf(deployment({ ...decided("frozen"), frozen_until_unix: 160 }), POLICY, 100);
  assert.match(frozen.find((gate) => gate.state === "closed").detail, /another 1 min/);
});

test("health names the worst that is known", () => {
  assert.equal(healthOf(deployment()).level, "good");
  const lost = [
    { rank: 0, fresh: true, trouble: "" },
    { rank: 1, fresh: false, trouble: "" },
  ];
  assert.deepEqual(healthOf(deployment({ ranks: lost })), {
    level: "bad",
    words: "1 rank of 2 not connected.",
  });
  assert.equal(
    healthOf(deployment({ held: true, held_because: "held_after_rollback" })).level,
    "attention",
  );
  assert.equal(healthOf(deployment({ balancedness_mean: null })).level, "unknown");
  assert.equal(healthOf(deployment(decided("planner_failed"))).level, "attention");
  assert.equal(healthOf(deployment(), 1).words, "1 proposal waits for approval.");
  const stopped = deployment({ reason: "group_stopped", ranks: [] });
  assert.deepEqual(healthOf(stopped), {
    level: "unknown",
    words: "The engine stopped as planned.",
  });
  const follower = { state: "follower", ranks: null, shape: null };
  assert.equal(healthOf({ ...deployment(follower), leader: null }).level, "bad");
  assert.equal(healthOf(deployment(follower)).level, "unknown");
});

test("a rank shows the state of its wave only while a plan needs it", () => {
  const rank = { fresh: true, trouble: "", state: "staging" };
  assert.equal(rankCondition(rank, { state: "migrating" }).words, "✓ staging");
  assert.equal(rankCondition(rank, { state: "ready" }).words, "✓ connected");
  const idle = { ...rank, state: "idle" };
  assert.equal(rankCondition(idle, { state: "migrating" }).words, "✓ connected");
  assert.equal(rankCondition({ ...rank, trouble: "no room" }, { state: "ready" }).kind, "bad");
  assert.deepEqual(rankCondition({ ...rank, fresh: false }, { state: "migrating" }), {
    kind: "bad",
    words: "✕ lost",
  });
});

test("the plan behind an epoch leads there from the epoch that the controller names", () => {
  const plans = [
    { plan_id: "waits", base_epoch: 7, waves_committed: 0 },
    { plan_id: "of another generation", base_epoch: 4, waves_committed: 3 },
    { plan_id: "last", base_epoch: 5, waves_committed: 2 },
    { plan_id: "first", base_epoch: 0, waves_committed: 5 },
  ];
  assert.equal(planBehind(plans, { epoch: 7, rollback_epoch: 5 }).plan_id, "last");
  assert.equal(planBehind(plans, { epoch: 5, rollback_epoch: 0 }).plan_id, "first");
  assert.equal(planBehind(plans, { epoch: 7, rollback_epoch: 6 }), undefined);
  assert.equal(planBehind(plans, { epoch: 7, rollback_epoch: null }), undefined);
});

test("the worst deployment comes first, then the least balanced", () => {
  const rows = [
    deployment({ deployment: "fine", balancedness_mean: 0.99 }),
    deployment({ deployment: "low", balancedness_mean: 0.5 }),
    deployment({ deployment: "stuck", active_plan: { phase: "stalled" } }),
    deployment({ deployment: "asks" }),
  ];
  const names = worstFirst(rows, { asks: 1 }).map((row) => row.deployment);
  assert.deepEqual(names, ["stuck", "asks", "low", "fine"]);
});

test("history keeps each moment once, and unknown balance stays unknown", () => {
  const first = pointOf({ at: 1, reason: "a", numbers: { balancedness_mean: 0.5 } });
  const second = pointOf({ at: 2, reason: "frozen", numbers: {} });
  const known = merge([], [second, first], 0);
  assert.deepEqual(
    known.map((point) => point.at),
    [1, 2],
  );
  assert.equal(merge(known, [second], 0), known);
  assert.equal(known[1].tokens, null);
  const read = pointOf({ at: 2, reason: "frozen" }, { balancedness_mean: 0.7 });
  assert.equal(merge(known, [read], 0)[1].tokens, 0.7);
  assert.deepEqual(
    merge(known, [], 2).map((point) => point.at),
    [2],
  );
  assert.deepEqual(columns(known), [[1], [null], [0.5]]);
  assert.deepEqual(
    reasonCounts(known).map((row) => row.share),
    [0.5, 0.5],
  );
});

test("a gap in time is drawn as one", () => {
  const points = [1, 2, 3, 40, 41].map((at) => ({ at, time: null, tokens: 0.5, reason: "x" }));
  assert.deepEqual(columns(points)[0], [1, 2, 3, 21.5, 40, 41]);
  assert.deepEqual(columns(points)[2], [0.5, 0.5, 0.5, null, 0.5, 0.5]);
});

test("only an expert that comes to a rank is a copy", () => {
  const base = [
    [0, 1, 2, 0],
    [0, 1, 2, 3],
  ];
  const target = [
    [1, 0, 2, 1],
    [0, 1, 2, 3],
  ];
  const waves = [{ index: 3, layers: [0] }];
  assert.deepEqual(movesBetween(base, target, 2, waves), [
    { layer: 0, expert: 1, slot: 3, rank: 1, holders: [0], wave: 3 },
  ]);
  assert.deepEqual(changedLayers(base, target), [0]);
  assert.deepEqual(ranksOf(base[0], 0, 2), [0, 1]);
  assert.equal(replicas([0, 0, -1, 2]).get(0), 2);
  assert.equal(replicas([0, 0, -1, 2]).has(-1), false);
  assert.equal(sameShape(base, [[0]]), false);
  assert.deepEqual(movesBetween([[0, 1]], [[-1, 1]], 1), []);
});

test("slots become narrower before they leave the drawing", () => {
  assert.equal(slotLayout(4, 8, 1200).columns, 3);
  const narrow = slotLayout(320, 9, 340);
  assert.equal(narrow.columns, 1);
  assert.ok(narrow.cell < 34 && narrow.blockWidth <= 340 + 16);
});

test("colours keep load, no load and unknown load apart", () => {
  for (const dark of [false, true]) {
    const seen = [null, ...SCALE_STOPS].map((load) => String(colourOf(load, dark)));
    assert.equal(new Set(seen).size, seen.length);
  }
  assert.equal(inkOn([255, 255, 255]), "#111");
  assert.equal(inkOn([0, 0, 0]), "#fff");
});

test("a picture has one pixel a cell", () => {
  const rows = [
    [1, null],
    [99, 0],
  ];
  const { width, height, pixels } = paint(rows, false);
  assert.deepEqual([width, height, pixels.length], [2, 2, 16]);
  rows.flat().forEach((load, i) => {
    assert.deepEqual([...pixels.slice(4 * i, 4 * i + 3)], colourOf(load, false));
    assert.equal(pixels[4 * i + 3], 255);
  });
});

test("the hottest cells are found in order", () => {
  const cells = hottest(
    [
      [1, null, 3],
      [2, 5, 0],
    ],
    2,
  );
  assert.deepEqual(cells, [
    { row: 1, column: 1, load: 5 },
    { row: 0, column: 2, load: 3 },
  ]);
  assert.deepEqual(hottest([[null]], 2), []);
});
