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
  isLoadPast,
  rankCondition,
  reportedWords,
  worstFirst,
} from "../../../service/evenkeel_moe/console/lib/health.js";
import {
  columns,
  hasTime,
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
    max_layer_deviation: 0.005,
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
      { rank: 0, fresh: true, stopped: false, trouble: "", epoch: 5, slowness: 1 },
      { rank: 1, fresh: true, stopped: false, trouble: "", epoch: 5, slowness: 1 },
    ],
    proposals: [],
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

test("counts that contradict each other close a gate of their own and are told", () => {
  const doubt = { severity: "doubt", words: "no expert counts: rank 1, all 6. Look." };
  const note = { severity: "note", words: "layers disagree" };
  const row = deployment({ findings: [note, doubt], ...decided("implausible_counts") });
  const gates = gatesOf(row, POLICY, 100);
  const gate = gates.find((each) => each.state === "closed");
  assert.equal(gate.title, "The counts agree with each other");
  assert.equal(gate.detail, doubt.words);
  assert.match(gate.remedy, /max_layer_deviation or max_idle_experts/);
  const words = "The counts are in doubt: no expert counts: rank 1, all 6. Look.";
  assert.deepEqual(healthOf(row, 2), { level: "attention", words });
  for (const findings of [[note], [], null, undefined]) {
    assert.equal(healthOf(deployment({ findings }), 2).level, "good");
  }
  const open = gatesOf(deployment(), POLICY, 100).find((each) => each.title === gate.title);
  assert.equal(open.detail, "Layers of a step may differ by 0.5 %.");
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

test("one gate alone names the mode", () => {
  const titles = gatesOf(deployment(), POLICY, 100).map((gate) => gate.title);
  assert.deepEqual(
    titles.filter((title) => /\bmode\b/i.test(title)),
    ["The mode lets plans start"],
  );
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
    /0.1 %, at least −10.0 %; needs 0.2 %/,
  );
  const frozen = gatesOf(deployment({ ...decided("frozen"), frozen_until_unix: 160 }), POLICY, 100);
  assert.match(frozen.find((gate) => gate.state === "closed").detail, /another 1 min/);
});

test("health names the worst that is known", () => {
  const health = (changes, now = 100) => healthOf(deployment(changes), now);
  const level = (changes, now) => health(changes, now).level;
  assert.deepEqual(health(), {
    level: "good",
    words: "Balance is good enough: nothing has to move.",
  });
  const [first, second] = deployment().ranks;
  const lost = { ranks: [first, { ...second, fresh: false }] };
  const waiting = [{ plan_id: "p" }];
  assert.deepEqual(health({ ...lost, proposals: waiting }), {
    level: "bad",
    words: "1 rank of 2 not connected.",
  });
  const ended = { ranks: [first, { ...second, fresh: false, stopped: true }] };
  const waits = { state: "waiting_for_ranks", reason: "ranks_missing" };
  const observing = { reason: "observe_only", ...decided("observe_only") };
  assert.deepEqual(health({ ...observing, mode: "auto" }), {
    level: "attention",
    words: "The ranks can be observed only: they cannot carry out plans.",
  });
  assert.equal(level({ ...observing, mode: "observe" }), "good", "as the mode asks");
  assert.deepEqual(health({ ...ended, ...waits }), {
    level: "attention",
    words: "1 rank stopped as planned.",
  });
  assert.equal(level({ ranks: [first, { ...second, trouble: "no room" }] }), "bad");
  assert.equal(level({ held: true, held_because: "held_after_rollback" }), "attention");
  assert.equal(level({ balancedness_mean: null }), "unknown");
  assert.equal(level({ last_decision: null }), "unknown");
  assert.equal(level(decided("planner_failed")), "attention");
  assert.equal(health({ proposals: waiting }).words, "1 proposal waits for approval.");
  const told = decided("plan_in_progress");
  assert.equal(health(told).words, "A plan has just ended.");
  assert.equal(health({ ...told, state: "migrating" }).words, "A plan is being carried out.");
  const stopped = deployment({ reason: "group_stopped", ranks: [] });
  assert.deepEqual(healthOf(stopped, 100), {
    level: "unknown",
    words: "The engine stopped as planned.",
  });
  const follower = { state: "follower", ranks: null, shape: null };
  assert.equal(level({ ...follower, leader: null }), "bad");
  assert.equal(level(follower), "unknown");
});

test("health is not good where an alert looks at the same numbers, and good just within", () => {
  const { ranks } = deployment();
  const withRank = (changes) => ({ ranks: [ranks[0], { ...ranks[1], ...changes }] });
  const plan = (phase, updated_at) => ({ state: "migrating", active_plan: { phase, updated_at } });
  const cases = [
    [{ balancedness_by_phase: { decode: 0.749 } }, { balancedness_by_phase: { decode: 0.75 } }],
    [
      { balancedness_by_phase: { decode: 0.9, prefill: 0.7, mixed: null } },
      { balancedness_by_phase: { decode: 0.9, prefill: null } },
    ],
    [{ time_balance: 0.749 }, { time_balance: 0.75 }],
    [withRank({ slowness: 1.31 }), withRank({ slowness: 1.3 })],
    [{ newest_step_unix: 879 }, { newest_step_unix: 880 }],
    [{ plan_aborted_unix: 101 }, { plan_aborted_unix: 100 }],
    [{ plans_lost_time: 2 }, { plans_lost_time: 1 }],
    [plan("migrating", 399), plan("migrating", 400)],
    [plan("migrating", 399), plan("paused", 399)],
    [{ last_decision: { at: 700, reason: "no_change" } }, {}],
    [{ frozen_until_unix: 2000 }, { frozen_until_unix: null }],
    [
      { ...withRank({ epoch: 6 }), ...plan("migrating", 879) },
      { ...withRank({ epoch: 6 }), ...plan("migrating", 880) },
    ],
    [withRank({ epoch: 6 }), withRank({ epoch: null })],
  ];
  const recent = { last_decision: { at: 999, reason: "no_change" } };
  for (const [alerts, quiet] of cases) {
    assert.notEqual(healthOf(deployment({ ...recent, ...alerts }), 1000).level, "good");
    assert.equal(healthOf(deployment({ ...recent, ...quiet }), 1000).level, "good");
  }
  assert.equal(
    healthOf(deployment({ ...recent, ...cases[1][0] }), 1000).words,
    "Balancedness of prefill is 0.700, below 0.75.",
  );
  assert.match(
    healthOf(deployment({ ...recent, ...cases[3][0] }), 1000).words,
    /^Rank 1 takes 1.31 times as long as the median rank/,
  );
});

test("load and balance are past while one rank of the group is not connected", () => {
  const [fresh, other] = deployment().ranks;
  assert.equal(isLoadPast(deployment()), false);
  assert.equal(isLoadPast(deployment({ ranks: [fresh, { ...other, fresh: false }] })), true);
  assert.equal(isLoadPast(deployment({ ranks: [fresh] })), true);
  assert.equal(isLoadPast({ ranks: null, shape: null }), false);
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
    deployment({ deployment: "asks", proposals: [{ plan_id: "p" }] }),
  ];
  const names = worstFirst(rows, 100).map((row) => row.deployment);
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
  assert.equal(hasTime(known), false);
  assert.equal(hasTime([...known, { ...first, time: 0.9 }]), true);
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

test("load that no rank reports any more is told as the past, with its age", () => {
  const at = (connected, reported) => reportedWords({ connected, reported }, 1000);
  assert.deepEqual(at(2, 1000), { words: "reported just now", past: false });
  assert.deepEqual(at(2, 998), { words: "last reported 2.0 s ago", past: false });
  assert.deepEqual(at(2, 760), { words: "last reported 4 min ago", past: true });
  const gone = "last reported 4 min ago, no rank is connected";
  assert.deepEqual(at(0, 760), { words: gone, past: true });
  assert.equal(at(0, 998).past, true);
  const unknown = "it is unknown when it was last reported";
  assert.deepEqual(at(2, null), { words: unknown, past: false });
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
