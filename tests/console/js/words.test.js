import assert from "node:assert/strict";
import test from "node:test";
import { adviceWords, outcomeWords } from "../../../service/evenkeel_moe/console/lib/advice.js";
import * as format from "../../../service/evenkeel_moe/console/lib/format.js";
import {
  eventWords,
  isRejected,
  pairWords,
  phaseOf,
  rankWords,
  storyRange,
  storyRows,
  tookWords,
  waveSpans,
} from "../../../service/evenkeel_moe/console/lib/timeline.js";
import { formOf, policyChanges } from "../../../service/evenkeel_moe/console/lib/changes.js";
import { allows, describe } from "../../../service/evenkeel_moe/console/lib/problem.js";
import { sentence } from "../../../service/evenkeel_moe/console/lib/reasons.js";
import { linkTo, parseRoute } from "../../../service/evenkeel_moe/console/lib/route.js";

test("an unknown value is never zero", () => {
  const { number, count, percent, signedPercent, bytes, duration, ago, moment } = format;
  for (const unknown of [null, undefined, NaN]) {
    for (const show of [number, count, percent, signedPercent, bytes, duration, moment]) {
      assert.equal(show(unknown), "unknown");
    }
    assert.equal(ago(unknown, 5), "unknown");
  }
  assert.equal(format.percentRange(0.1, null), "unknown");
  assert.equal(format.number(0), "0.000");
  assert.equal(format.text(""), "unknown");
});

test("numbers have units and separators", () => {
  assert.equal(format.count(1234567), "1,234,567");
  assert.equal(format.counted(1, "copy", "copies"), "1 copy");
  assert.equal(format.counted(2, "copy", "copies"), "2 copies");
  assert.equal(format.percent(0.3456), "34.6 %");
  assert.equal(format.signedPercent(-0.02), "−2.0 %");
  assert.equal(format.signedPercent(0), "0.0 %");
  assert.equal(format.bytes(999), "999 B");
  assert.equal(format.bytes(2_400_000), "2.4 MB");
  assert.equal(format.bytes(-1e13), "−10.0 TB");
});

test("every negative number has the same sign", () => {
  assert.equal(format.number(-0.5), "−0.500");
  assert.equal(format.count(-1234), "−1,234");
  assert.equal(format.percent(-0.02), "−2.0 %");
  assert.equal(format.percentRange(-0.12, -0.01), "−12.0 to −1.0 %");
  assert.equal(format.withMinus("-1e-9"), "−1e-9");
  assert.equal(format.number(-0.0001), "0.000");
  assert.equal(format.signedPercent(-0.0001), "0.0 %");
  assert.equal(format.signedRange(-0.038, 0.004), "−3.8 to +0.4 %");
  assert.equal(format.wordsWithMinus("from -1.81% to keel-2 (-1)"), "from −1.81% to keel-2 (−1)");
});

test("a payback has two significant digits", () => {
  const cases = [
    [2.16e-5, "22 µs"],
    [0.02949, "29 ms"],
    [1.26, "1.3 s"],
    [754, "13 min"],
    [200000, "2.3 days"],
    [null, "unknown"],
  ];
  for (const [seconds, words] of cases) assert.equal(format.roughDuration(seconds), words);
  assert.equal(format.twoDigits(1234), 1200);
});

test("times are told in two units at most", () => {
  const cases = [
    [2.5e-6, "2.5 µs"],
    [0.0249, "24.9 ms"],
    [9.94, "9.9 s"],
    [59, "59 s"],
    [60, "1 min"],
    [758, "12 min 38 s"],
    [3600, "1 h"],
    [5400, "1 h 30 min"],
    [2 * 86400 + 3600, "2 days 1 h"],
  ];
  for (const [seconds, words] of cases) assert.equal(format.duration(seconds), words);
  assert.equal(format.ago(100, 112), "12 s ago");
  assert.equal(format.ago(160, 100), "in 1 min");
  assert.equal(format.ago(102, 100), "now");
  assert.equal(format.moment(0), "1970-01-01 00:00:00 UTC");
});

test("an address names a deployment, a view and a plan, whatever their letters", () => {
  assert.deepEqual(parseRoute(""), { deployment: null, view: "fleet", plan: null });
  const route = { deployment: "a b", view: "plans", plan: "p/1" };
  assert.deepEqual(parseRoute(linkTo("a b", "plans", "p/1")), route);
  assert.deepEqual(parseRoute("#/d/x/nothing"), { deployment: "x", view: "why", plan: null });
  assert.equal(parseRoute("#/d/%E0%A4%A").deployment, "%E0%A4%A");
  assert.equal(linkTo(null), "#/");
});

test("an error says who leads, or what the controller said", () => {
  assert.match(describe(0, null), /does not answer/);
  assert.match(describe(401, null), /revoked/);
  assert.match(describe(503, { reason: "not_leader", leader: "keel-1" }), /keel-1 leads/);
  const nobody = describe(503, { reason: "not_leader", leader: null });
  assert.match(nobody, /^Neither this controller nor another replica holds the lease/);
  assert.match(describe(0, { waited_s: 20 }), /^The controller has not answered within 20 s/);
  assert.equal(describe(409, { title: "No", detail: "why" }), "No: why.");
  assert.equal(describe(500, null), "The answer has status 500.");
});

test("a role includes the rights of the roles before it", () => {
  assert.deepEqual(
    ["read", "operate", "admin"].map((role) => allows(role, "operate")),
    [false, true, true],
  );
  assert.equal(allows("strange", "operate"), false);
});

test("a recommendation says what would happen, by the mode, and never that it happened", () => {
  assert.equal(outcomeWords("plan_started", "auto"), "Would start a plan.");
  assert.equal(outcomeWords("plan_started", "propose"), "Would propose a plan.");
  assert.match(outcomeWords("plan_started", "observe"), /the controller starts nothing/);
  assert.equal(outcomeWords("plan_started", null), "Would make a plan.");
  assert.equal(
    adviceWords("plan_started", "propose"),
    "A cycle would propose a plan, if the gates before planning are open.",
  );
  for (const words of [outcomeWords, adviceWords]) {
    assert.equal(words("gain_too_small", "auto"), sentence("gain_too_small"));
  }
});

test("an unknown reason is shown as it is", () => {
  assert.equal(sentence("brand_new"), "brand_new.");
  assert.equal(sentence(null), "The reason is unknown.");
});

const row = (at, event, more = {}) => ({
  at,
  event,
  phase: "migrating",
  reason: "plan_started",
  ...more,
});

test("waves are spans from their start to their commit", () => {
  const story = [
    row(1, "created"),
    row(2, "wave_started"),
    row(4, "wave_committed", { waves_committed: 1 }),
    row(5, "wave_started"),
    row(9, "ended", { reason: "cancelled" }),
    row(99, "measured"),
  ];
  const spans = waveSpans(story).map(({ ranks, numRanks, ...span }) => span);
  assert.deepEqual(spans, [
    { index: 0, from: 2, to: 4, committed: true },
    { index: 1, from: 5, to: 9, committed: false },
  ]);
  assert.deepEqual(storyRange(story, 50, true), [1, 9]);
  assert.equal(waveSpans(story.slice(0, 4)).at(-1).to, null);
  assert.deepEqual(storyRange(story.slice(0, 4), 50, false), [1, 50]);
});

test("the timeline begins when the plan begins, not when it was proposed", () => {
  const story = [
    row(1, "created", { phase: "proposed" }),
    row(600, "approved", { phase: "approved" }),
    row(602, "wave_started"),
    row(605, "wave_committed", { waves_committed: 1 }),
    row(606, "ended", { phase: "committed" }),
  ];
  assert.deepEqual(storyRange(story, 900, true), [600, 606]);
  assert.deepEqual(storyRange(story.slice(0, 1), 9, false), [1, 9]);
});

test("a rank that has not told the state of its wave is not said to be idle", () => {
  assert.equal(rankWords({ state: "idle", epoch: 6 }), "epoch 6");
  assert.equal(rankWords({ state: "unknown", epoch: 6 }), "epoch 6");
  assert.equal(rankWords({ state: "staging", epoch: 6 }), "staging, epoch 6");
  assert.equal(rankWords({ state: "unknown", epoch: null }), "epoch unknown");
});

test("a wave that is tried again has two spans", () => {
  const spans = waveSpans([row(1, "wave_started"), row(3, "wave_started")]);
  assert.deepEqual(
    spans.map((span) => [span.index, span.from, span.to]),
    [
      [0, 1, 3],
      [0, 3, null],
    ],
  );
});

test("a planner that starts is told without the words of HTTP", () => {
  const problem = { title: "Temporarily unavailable", detail: "x", reason: "planner_starting" };
  assert.match(describe(503, problem), /^The planner is starting\. /);
});

test("events are told in words", () => {
  assert.equal(eventWords(row(1, "approved", { by: "ann" })), "Approved by ann");
  assert.equal(
    eventWords(row(1, "created", { by: "auto", reason: "load_changed" })),
    "Created in mode auto: The traffic changed, so a plan was made.",
  );
  assert.equal(
    eventWords(row(1, "ended", { reason: "cancelled" })),
    "Ended: An operator cancelled it.",
  );
  const measured = row(1, "measured", { promised_gain: 0.1, delivered_gain: null, steps: 0 });
  assert.equal(
    eventWords(measured),
    "Saving of MoE time measured: promised 10.0 %, delivered unknown",
  );
  const known = { promised_lower: 0.08, delivered_gain: 0.09, delivered_lower: 0.085 };
  assert.equal(
    eventWords({ ...measured, ...known, delivered_upper: 0.095, steps: 512 }),
    "Saving of MoE time measured on 512 steps: promised 10.0 % (at least 8.0 %), delivered" +
      " +9.0 % (95 % interval 8.5 to 9.5 %)",
  );
  const back = row(1, "measured", { promised_gain: null, delivered_gain: -0.204 });
  assert.equal(
    eventWords(back, { kind: "rollback" }),
    "Saving of MoE time measured: delivered −20.4 %. A rollback returns to an earlier placement," +
      " so MoE time may rise.",
  );
  assert.equal(eventWords(row(1, "brand_new")), "brand new");
});

test("a story counts its waves, and tells what each copies and to which epoch it led", () => {
  const story = [
    row(1, "created", { phase: "proposed", reason: "manual_request", by: "ann" }),
    row(2, "wave_started", { detail: "wave 1 of 3: 9 transfers" }),
    row(3, "wave_committed", { waves_committed: 1, detail: "epoch 5" }),
    row(4, "wave_started"),
    row(5, "paused", { reason: "no_steps", phase: "paused", detail: "no step for 9 s" }),
    row(6, "wave_committed", { waves_committed: 3, detail: "found on the ranks" }),
  ];
  const wave_list = [1, 2, 3].map((moves) => ({ moves, nbytes: 1000 * moves }));
  const rows = storyRows({ kind: "manual", base_epoch: 4, waves: 3, wave_list, story });
  assert.deepEqual(
    rows.map((each) => each.words),
    [
      "Created by ann: An operator asked for this plan.",
      "Wave 1 of 3 began: 1 copy, 1.0 kB",
      "Wave 1 of 3 was committed: the ranks are at epoch 5",
      "Wave 2 of 3 began: 2 copies, 2.0 kB",
      "Paused: The ranks run no steps.",
      "Waves 2 to 3 of 3 were committed: the ranks are at epoch 7",
    ],
  );
  assert.deepEqual(
    rows.map((each) => each.detail),
    ["", "", "", "", "no step for 9 s", "found on the ranks"],
  );
});

test("a plan that another one replaced is superseded, one that breaks a rule is refused", () => {
  const phase = (name, reason) => phaseOf({ phase: name, reason });
  for (const reason of ["stale_base", "generation_changed", "weights_version_changed"]) {
    assert.equal(phase("refused", reason), "superseded");
    assert.equal(phase("aborted", reason), "aborted");
  }
  assert.equal(phase("refused", "empty_slots"), "refused");
});

const POLICY = {
  mode: "auto",
  cycle_s: 2,
  proposal_ttl_s: 3600,
  thresholds: { plan_below: 0.9, cooldown_s: 8 },
  limits: { max_moves: null, max_bytes: 5 },
};

test("only fields that differ are sent", () => {
  const form = formOf(POLICY);
  assert.deepEqual(policyChanges(POLICY, form), { changes: {}, errors: [] });
  form.mode = "observe";
  form.thresholds.plan_below = "0.85";
  form.limits = { max_moves: "100", max_bytes: "" };
  assert.deepEqual(policyChanges(POLICY, form).changes, {
    mode: "observe",
    thresholds: { plan_below: 0.85 },
    limits: { max_moves: 100, max_bytes: null },
  });
});

test("text that is no number is named, not sent", () => {
  const form = { ...formOf(POLICY), cycle_s: "", limits: { max_moves: "many", max_bytes: "5" } };
  const { changes, errors } = policyChanges(POLICY, form);
  assert.deepEqual(changes, {});
  assert.deepEqual(
    errors.map((words) => words.split(":")[0]),
    ["Cycle", "Copies of one plan"],
  );
});

test("a wave keeps what each rank took for it, and is unknown in older plans", () => {
  const rank = { rank: 1, voted_s: 0.4, swapped_s: 0.5, stall_s: 0.02 };
  const started = { event: "wave_started", at: 10 };
  const [known] = waveSpans([{ ...started, num_ranks: 40, ranks: [rank] }]);
  assert.deepEqual([known.ranks, known.numRanks], [[rank], 40]);
  assert.deepEqual(waveSpans([started])[0].ranks, null);
  const words = "voted after 400 ms, swapped after 500 ms, step waited 20 ms";
  assert.equal(tookWords(rank), words);
  const silent = { rank: 2, voted_s: null, swapped_s: null, stall_s: null };
  assert.equal(tookWords(silent), "did not vote");
});

test("a proposal that was cancelled is rejected, a plan that was cancelled is not", () => {
  const asked = (phase) => ({ event: "cancel_requested", phase, by: "kim" });
  const plan = (...story) => ({ phase: "cancelled", story });
  assert.equal(isRejected(plan(asked("proposed"))), true);
  assert.equal(isRejected(plan(asked("migrating"))), false);
  assert.equal(isRejected({ phase: "proposed", story: [asked("proposed")] }), false);
  assert.equal(eventWords(asked("proposed")), "Rejected by kim");
  assert.equal(eventWords(asked("migrating")), "Cancellation requested by kim");
});

test("the balance that a plan was made on is not that of now once the plan was begun", () => {
  assert.deepEqual(pairWords({ phase: "proposed" }), ["now", "then"]);
  for (const phase of ["migrating", "committed", "aborted"]) {
    assert.deepEqual(pairWords({ phase }), ["before", "predicted after"]);
  }
});
