/** The health of a deployment in one word and one sentence, and the order of the fleet. */

import { NO_LEASE } from "./problem.js";
import { sentence } from "./reasons.js";
import { ago, counted, duration, isKnown, number } from "./format.js";

/** Levels from worst to best. */
export const LEVELS = ["bad", "attention", "unknown", "good"];

/** The words and signs of the levels; the sign keeps them apart without colour. */
export const LEVEL_SIGNS = {
  bad: ["✕", "Trouble"],
  attention: ["!", "Needs attention"],
  unknown: ["?", "Unknown"],
  good: ["✓", "Good"],
};

/** Bounds of the alerts in deploy/prometheus, as delivered. */
export const ALERT_BOUNDS = {
  balance: 0.75,
  dataAgeS: 120,
  slowness: 1.3,
  planUnchangedS: 600,
  planAbortedS: 900,
  plansLostTime: 2,
  noDecisionS: 300,
  epochsDifferS: 120,
};

/**
 * The conditions of a deployment that this replica leads. Of those with the same level the first is
 * told. A condition that an alert of deploy/prometheus also looks at holds at once, not only after
 * the time for which the alert waits. Each gets (deployment, now) and returns [level, words] or
 * null.
 */
const CONDITIONS = [
  ({ ranks, shape, state, reason }) => {
    const { missing, stopped, told } = troubledRanks({ ranks, shape });
    const absent = `${counted(missing, "rank")} of ${shape?.num_ranks} not connected.`;
    if (missing > 0) return ["bad", absent];
    if (told > 0) return ["bad", `${counted(told, "rank takes", "ranks take")} no more waves.`];
    if (stopped > 0) return ["attention", `${counted(stopped, "rank")} stopped as planned.`];
    return state === "waiting_for_ranks" ? ["bad", sentence(reason)] : null;
  },
  ({ active_plan: plan }) =>
    plan?.phase === "stalled" ? ["bad", "The running plan cannot continue."] : null,
  ({ last_decision: decision }) =>
    decision?.reason === "store_unavailable" ? ["bad", sentence(decision.reason)] : null,
  ({ ranks, active_plan: plan }, now) => {
    const epochs = new Set(ranks.filter((rank) => rank.fresh).map((rank) => rank.epoch));
    epochs.delete(null);
    // While a plan runs, one rank tells of its swap before another.
    const swaps = plan && now - plan.updated_at <= ALERT_BOUNDS.epochsDifferS;
    return epochs.size > 1 && !swaps
      ? ["bad", `Ranks report different epochs: ${[...epochs].join(", ")}.`]
      : null;
  },
  ({ state, reason }) => (state === "recovering" ? ["attention", sentence(reason)] : null),
  ({ mode, reason }) =>
    reason === "observe_only" && mode !== "observe" ? ["attention", sentence(reason)] : null,
  ({ active_plan: plan }, now) => {
    const unchanged = plan && plan.phase !== "paused" ? now - plan.updated_at : 0;
    return unchanged > ALERT_BOUNDS.planUnchangedS
      ? ["attention", `The running plan has made no progress for ${duration(unchanged)}.`]
      : null;
  },
  ({ held, held_because: because }) => (held ? ["attention", sentence(because)] : null),
  ({ frozen_until_unix: until }) => (until ? ["attention", sentence("frozen")] : null),
  ({ findings }) => {
    const [first] = doubts(findings);
    return first ? ["attention", `The counts are in doubt: ${first}`] : null;
  },
  ({ dispatch_warning: warning }) => (warning ? ["attention", warning] : null),
  ({ proposals, last_decision: decision, state }) => {
    const waiting = proposals?.length ?? 0;
    const verb = waiting === 1 ? "waits" : "wait";
    if (waiting) return ["attention", `${counted(waiting, "proposal")} ${verb} for approval.`];
    const proposed = decision?.reason === "plan_proposed" && state !== "migrating";
    return proposed ? ["attention", sentence(decision.reason)] : null;
  },
  ({ plan_aborted_unix: at }, now) =>
    isKnown(at) && now - at < ALERT_BOUNDS.planAbortedS
      ? ["attention", `A plan was aborted ${ago(at, now)}.`]
      : null,
  ({ plans_lost_time: lost }) =>
    lost >= ALERT_BOUNDS.plansLostTime
      ? ["attention", `The newest ${lost} plans that were measured made steps slower.`]
      : null,
  ({ last_decision: decision }) =>
    ["planner_failed", "stale_data"].includes(decision?.reason)
      ? ["attention", sentence(decision.reason)]
      : null,
  ({ last_decision: decision }, now) =>
    decision && now - decision.at >= ALERT_BOUNDS.noDecisionS
      ? ["attention", `No cycle has ended for ${duration(now - decision.at)}.`]
      : null,
  ({ newest_step_unix: at }, now) =>
    isKnown(at) && now - at > ALERT_BOUNDS.dataAgeS
      ? ["attention", `The newest complete step is ${duration(now - at)} old.`]
      : null,
  ({ ranks }) => {
    const slow = ranks.filter((rank) => rank.slowness > ALERT_BOUNDS.slowness);
    const worst = slow.sort((a, b) => b.slowness - a.slowness)[0];
    const times = `${number(worst?.slowness, 2)} times as long as the median rank`;
    return worst ? ["attention", `Rank ${worst.rank} takes ${times} for the same tokens.`] : null;
  },
  ({ time_balance: time, balancedness_by_phase: phases }) => {
    const bound = ALERT_BOUNDS.balance;
    const words = (what, value) => [
      "attention",
      `${what} is ${number(value)}, below ${number(bound, 2)}.`,
    ];
    if (isKnown(time) && time < bound) return words("Time balance", time);
    const known = Object.entries(phases ?? {}).filter(([, value]) => isKnown(value));
    const [phase, least] = known.sort(([, a], [, b]) => a - b)[0] ?? [];
    const what = known.length > 1 ? `Balancedness of ${phase}` : "Balancedness";
    return least < bound ? words(what, least) : null;
  },
  ({ balancedness_mean: mean }) =>
    isKnown(mean) ? null : ["unknown", "The load is not known yet."],
  ({ last_decision: decision }) => (decision ? null : ["unknown", "No cycle has ended yet."]),
];

/**
 * The one place that decides about health. While an alert of deploy/prometheus about a deployment
 * fires, its level is not `good`, except for alerts on what the API does not tell: the past of
 * hours, delays of swaps, refused reports, displaced ranks, restarts after an error.
 *
 * @param {object} deployment as REST returns it
 * @param {number} now Unix seconds
 * @returns {{level: string, words: string}} The worst condition.
 */
export function healthOf(deployment, now) {
  const { state, reason, last_decision: decision } = deployment;
  if (state === "follower") {
    const leader = deployment.leader;
    return {
      level: leader ? "unknown" : "bad",
      words: leader ? `Replica ${leader} leads it; ask that replica.` : NO_LEASE,
    };
  }
  if (reason === "group_stopped") return { level: "unknown", words: sentence(reason) };
  const found = CONDITIONS.map((condition) => condition(deployment, now)).filter((one) => one);
  const worst = LEVELS.find((level) => found.some(([each]) => each === level));
  if (worst) return { level: worst, words: found.find(([each]) => each === worst)[1] };
  if (state === "migrating") return { level: "good", words: sentence("plan_in_progress") };
  // The newest cycle still met the plan, which has ended since.
  const over = decision.reason === "plan_in_progress";
  return { level: "good", words: over ? "A plan has just ended." : sentence(decision.reason) };
}

/**
 * @param {object[] | null | undefined} findings about the counts of a deployment
 * @returns {string[]} The words of those under which nothing is planned.
 */
export function doubts(findings) {
  return (findings ?? []).filter((each) => each.severity === "doubt").map((each) => each.words);
}

/**
 * @param {object} deployment
 * @returns {{missing: number, stopped: number, told: number}} Ranks without a valid lease that did
 *   not stop as planned; ranks that stopped; ranks that take no more waves.
 */
function troubledRanks(deployment) {
  const ranks = deployment.ranks ?? [];
  const fresh = ranks.filter((rank) => rank.fresh).length;
  const stopped = ranks.filter((rank) => rank.stopped).length;
  const expected = deployment.shape?.num_ranks ?? ranks.length;
  return {
    missing: expected - fresh - stopped,
    stopped,
    told: ranks.filter((rank) => rank.trouble).length,
  };
}

/**
 * The window of load stays after the last rank is gone.
 *
 * @param {{connected: number, reported: number | null}} map ranks that are connected, and Unix
 *   seconds of the newest complete step
 * @param {number} now Unix seconds
 * @returns {{words: string, past: boolean}} How old the load is; `past` if it is not current.
 */
export function reportedWords({ connected, reported }, now) {
  const told = ago(reported, now);
  const known = told === "now" ? "reported just now" : `last reported ${told}`;
  const when = isKnown(reported) ? known : "it is unknown when it was last reported";
  const old = isKnown(reported) && now - reported > ALERT_BOUNDS.dataAgeS;
  const words = connected ? when : `${when}, no rank is connected`;
  return { words, past: old || !connected };
}

/**
 * A step is complete only with the reports of all ranks, so that load and balance stay as they were
 * while one rank is missing.
 *
 * @param {object} deployment
 * @returns {boolean} True if ranks are known and not all of them are connected.
 */
export function isLoadPast({ ranks, shape }) {
  const fresh = ranks?.filter((rank) => rank.fresh).length;
  return isKnown(fresh) && fresh < (shape?.num_ranks ?? ranks.length);
}

/**
 * A rank tells the state of its wave while a plan runs or its end is made sure of. Afterwards the
 * last state that it told says nothing about now.
 *
 * @param {object} rank
 * @param {object} deployment
 * @returns {{kind: string, words: string}} The colour and the words of its badge.
 */
export function rankCondition(rank, deployment) {
  if (!rank.fresh) return { kind: "bad", words: "✕ lost" };
  if (rank.trouble) return { kind: "bad", words: "✕ takes no waves" };
  const idle = deployment.state === "ready" || rank.state === "idle";
  return { kind: "good", words: `✓ ${idle ? "connected" : rank.state}` };
}

/**
 * @param {object[]} deployments
 * @param {number} now Unix seconds
 * @returns {object[]} Worst first; then by balance, the lowest first; then by name.
 */
export function worstFirst(deployments, now) {
  const key = (row) => [LEVELS.indexOf(healthOf(row, now).level), balanceOf(row) ?? 2];
  return [...deployments].sort((a, b) => {
    const [levelA, balanceA] = key(a);
    const [levelB, balanceB] = key(b);
    return levelA - levelB || balanceA - balanceB || (a.deployment < b.deployment ? -1 : 1);
  });
}

/** @param {object} row @returns {number | null} The balance by which the gates decide. */
export function balanceOf(row) {
  return row.time_balance ?? row.balancedness_mean;
}
