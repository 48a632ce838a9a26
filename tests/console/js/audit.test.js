import assert from "node:assert/strict";
import test from "node:test";
import { auditWords } from "../../../service/evenkeel_moe/console/lib/audit.js";

const BASE = "/v1/deployments/chat";

function wordsOf(method, path, change) {
  const text = change === undefined ? null : JSON.stringify(change);
  return auditWords({ method, path: `${BASE}${path}`, change: text }, BASE).words;
}

test("a request is told as what it asked for", () => {
  const cases = [
    ["POST", "/freeze", { seconds: 3600 }, "Freeze for 1 h"],
    ["POST", "/freeze", { seconds: 0 }, "End of the freeze"],
    ["POST", "/freeze", undefined, "Freeze"],
    ["POST", "/resume", undefined, "Resume automatic plans"],
    ["POST", "/rollback", { to_epoch: 0 }, "Roll back to epoch 0"],
    ["POST", "/rollback", undefined, "Roll back the last plan"],
    ["POST", "/rollback", { to_placement: "001122334455" }, "Roll back to placement 001122334455"],
    ["POST", "/plans/p-1/approve", undefined, "Approve plan p-1"],
    ["POST", "/plans/p-1/cancel", undefined, "Reject or cancel plan p-1"],
    ["POST", "/plans", { dry_run: true }, "Dry run of a plan"],
    [
      "POST",
      "/plans",
      { approve: true, policy: "eplb", limits: { max_moves: 3 }, plan_id: "mine" },
      "A plan that starts at once with the id mine: policy eplb, Copies of one plan 3",
    ],
    ["POST", "/plans", { target: "given" }, "A plan: target given"],
    [
      "PATCH",
      "/policy",
      { mode: "auto", cycle_s: 90, thresholds: { plan_below: 0.85 }, limits: { max_bytes: null } },
      "Change the policy: mode auto, Cycle 1 min 30 s, plan_below 0.85, Bytes of one plan none",
    ],
    [
      "PATCH",
      "/policy",
      { schedule: { windows: [] } },
      'Change the policy: schedule {"windows":[]}',
    ],
    ["DELETE", "/quarantine", undefined, "Reset the counts of reports that were not used"],
    ["DELETE", "", undefined, "Forget the deployment"],
  ];
  for (const [method, path, change, words] of cases) {
    assert.equal(wordsOf(method, path, change), words);
  }
});

test("a plan of any id is told by its id", () => {
  for (const id of ["p", "pl", "plan", "plans", "approve", "cancel", "s", "plans.plans"]) {
    assert.equal(wordsOf("POST", `/plans/${id}/approve`), `Approve plan ${id}`);
    assert.equal(wordsOf("POST", `/plans/${id}/cancel`), `Reject or cancel plan ${id}`);
  }
});

test("what is not known, or was cut, is shown as it was sent", () => {
  const cut = { method: "PATCH", path: `${BASE}/policy`, change: '{"thresholds":{"plan_' };
  assert.deepEqual(auditWords(cut, BASE), { words: cut.change, request: "PATCH /policy" });
  const strange = { method: "PUT", path: `${BASE}/new`, change: null };
  assert.deepEqual(auditWords(strange, BASE), { words: "", request: "PUT /new" });
  const elsewhere = { method: "POST", path: "/v1/nothing", change: null };
  assert.equal(auditWords(elsewhere, BASE).request, "POST /v1/nothing");
});
