import assert from "node:assert/strict";
import test from "node:test";
import {
  colourOf,
  hottest,
  inkOn,
  paint,
  SCALE_STOPS,
} from "../../../service/evenkeel_moe/console/lib/colour.js";
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
  ranksOf,
  replicas,
  sameShape,
  slotLayout,
} from "../../../service/evenkeel_moe/console/lib/placement.js";
import {
  isLoadPast,
  rankCondition,
  reportedWords,
  worstFirst,
} from "../../../service/evenkeel_moe/console/lib/ranks.js";

function deployment(changes = {}) {
  return {
    deployment: "chat",
    health: { level: "good", text: "Fine." },
    state: "ready",
    shape: { num_ranks: 2 },
    ranks: [
      { rank: 0, fresh: true },
      { rank: 1, fresh: true },
    ],
    balancedness_mean: 0.95,
    time_balance: null,
    ...changes,
  };
}

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
  const aborted = { ...rank, state: "aborted" };
  assert.equal(rankCondition(aborted, { state: "migrating" }).kind, "bad");
});

test("a rank that has not told the state of its wave is not said to be idle", () => {
  for (const state of ["idle", "unknown"]) {
    const rank = { fresh: true, trouble: "", state, epoch: 6 };
    assert.equal(rankCondition(rank, { state: "migrating" }).words, "✓ connected");
  }
});

test("a rank that stopped is not lost, and one without a connection is not alive", () => {
  const rank = { fresh: true, stopped: false, trouble: "", state: "unknown", epoch: null };
  const of = (changes) => rankCondition({ ...rank, ...changes }, { state: "ready" });
  assert.deepEqual(of({}), { kind: "warn", words: "? disconnected" });
  assert.deepEqual(of({ fresh: false, stopped: true }), {
    kind: "warn",
    words: "! stopped as planned",
  });
  assert.equal(of({ fresh: false }).words, "✕ lost");
});

test("the worst deployment comes first, then the least balanced", () => {
  const row = (name, level, balance) =>
    deployment({ deployment: name, health: { level, text: "" }, balancedness_mean: balance });
  const rows = [
    row("fine", "good", 0.99),
    row("low", "attention", 0.5),
    row("stuck", "bad", 0.95),
    row("unknown", "unknown", null),
    row("asks", "attention", 0.95),
    row("better", "good", 0.98),
  ];
  assert.deepEqual(
    worstFirst(rows).map((each) => each.deployment),
    ["stuck", "low", "asks", "unknown", "better", "fine"],
  );
});

test("history keeps each moment once, and unknown balance stays unknown", () => {
  const first = pointOf({
    at: 1,
    reason: "a",
    reason_text: "A.",
    numbers: { balancedness_mean: 0.5 },
  });
  const second = pointOf({ at: 2, reason: "frozen", reason_text: "B.", numbers: {} });
  const known = merge([], [second, first], 0);
  assert.deepEqual(
    known.map((point) => point.at),
    [1, 2],
  );
  assert.equal(merge(known, [second], 0), known);
  assert.equal(known[1].tokens, null);
  const read = pointOf({ at: 2, reason: "frozen" }, { balancedness_mean: 0.7 });
  assert.equal(merge(known, [read], 0)[1].tokens, 0.7);
  const [rank] = deployment().ranks;
  const lost = deployment({ ranks: [rank, { ...rank, fresh: false }], balancedness_mean: 0.7 });
  assert.equal(pointOf({ at: 3, reason: "ranks_missing" }, lost).tokens, null, "it is the past's");
  assert.deepEqual(
    merge(known, [], 2).map((point) => point.at),
    [2],
  );
  assert.deepEqual(columns(known), [[1], [null], [0.5]]);
  assert.equal(hasTime(known), false);
  assert.equal(hasTime([...known, { ...first, time: 0.9 }]), true);
  assert.deepEqual(reasonCounts(known), [
    { reason: "a", words: "A.", count: 1, share: 0.5 },
    { reason: "frozen", words: "B.", count: 1, share: 0.5 },
  ]);
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

test("load is told with its age, and whether any rank is connected", () => {
  const at = (ranks_connected, newest_step_unix) =>
    reportedWords({ ranks_connected, newest_step_unix }, 1000);
  assert.equal(at(2, 1000), "reported just now");
  assert.equal(at(2, 998), "last reported 2 s ago");
  assert.equal(at(2, 760), "last reported 4 min ago");
  assert.equal(at(0, 760), "last reported 4 min ago, no rank is connected");
  assert.equal(at(2, null), "it is unknown when it was last reported");
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
