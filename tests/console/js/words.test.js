import assert from "node:assert/strict";
import test from "node:test";
import * as format from "../../../service/evenkeel_moe/console/lib/format.js";
import {
  storyRange,
  tookWords,
  waveSpans,
} from "../../../service/evenkeel_moe/console/lib/timeline.js";
import { formOf, policyChanges } from "../../../service/evenkeel_moe/console/lib/changes.js";
import { allows, describe } from "../../../service/evenkeel_moe/console/lib/problem.js";
import { linkTo, parseRoute } from "../../../service/evenkeel_moe/console/lib/route.js";

test("an unknown value is never zero", () => {
  const { number, count, percent, signedPercent, bytes, duration, ago, moment } = format;
  for (const unknown of [null, undefined, NaN]) {
    for (const show of [number, count, percent, signedPercent, bytes, duration, moment]) {
      assert.equal(show(unknown), "unknown");
    }
    assert.equal(ago(unknown, 5), "unknown");
  }
  assert.equal(format.number(0), "0.000");
  assert.equal(format.text(""), "unknown");
});

test("numbers have units and separators", () => {
  assert.equal(format.count(1234567), "1,234,567");
  assert.equal(format.counted(1, "copy", "copies"), "1 copy");
  assert.equal(format.counted(2, "copy", "copies"), "2 copies");
  assert.equal(format.percent(0.3456), "34.6%");
  assert.equal(format.signedPercent(-0.02), "-2.0%");
  assert.equal(format.signedPercent(0), "0.0%");
  assert.equal(format.bytes(999), "999 B");
  assert.equal(format.bytes(2_400_000), "2.4 MB");
  assert.equal(format.bytes(999_999), "1 MB");
  assert.equal(format.bytes(1_250_000_000), "1.25 GB");
  assert.equal(format.bytes(-1e13), "-10 TB");
  assert.equal(format.signedPercent(0.004), "+0.4%");
  assert.equal(format.signedPercent(-0.0001), "0.0%");
  assert.equal(format.number(-0.0001), "0.000");
  assert.equal(format.number(-0.5), "-0.500");
});

test("times have the unit that keeps them short", () => {
  const cases = [
    [0, "0 s"],
    [2.5e-6, "2.5 µs"],
    [0.0249, "24.9 ms"],
    [9.94, "9.94 s"],
    [119, "119 s"],
    [600, "10 min"],
    [9000, "2.5 h"],
    [3 * 86400, "3 d"],
  ];
  for (const [seconds, words] of cases) assert.equal(format.duration(seconds), words);
  assert.equal(format.ago(100, 112), "12 s ago");
  assert.equal(format.ago(160, 100), "in 60 s");
  assert.equal(format.ago(100, 365), "4 min ago");
  assert.equal(format.ago(0, 7320), "2 h ago");
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
  const away = { title: "Temporarily unavailable", detail: "chat is led by keel-1" };
  assert.equal(describe(503, away), "Chat is led by keel-1.");
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

const POLICY = {
  mode: "auto",
  cycle_s: 2,
  proposal_ttl_s: 3600,
  thresholds: { plan_below: 0.9, cooldown_s: 8 },
  limits: { max_moves: null, max_bytes: 5 },
};

test("only fields that differ are sent", () => {
  const form = formOf(POLICY);
  assert.deepEqual(policyChanges(POLICY, form), {});
  form.mode = "observe";
  form.thresholds.plan_below = "0.85";
  form.limits = { max_moves: "100", max_bytes: "" };
  assert.deepEqual(policyChanges(POLICY, form), {
    mode: "observe",
    thresholds: { plan_below: 0.85 },
    limits: { max_moves: 100, max_bytes: null },
  });
});

test("text that is no number is sent as it is, for the controller to refuse", () => {
  const form = { ...formOf(POLICY), cycle_s: "", limits: { max_moves: "many", max_bytes: "5" } };
  assert.deepEqual(policyChanges(POLICY, form), { cycle_s: "", limits: { max_moves: "many" } });
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

