/** The health of a deployment in one word and one sentence, and the order of the fleet. */

import { sentence } from "./reasons.js";
import { counted } from "./format.js";

/** Levels from worst to best. */
export const LEVELS = ["bad", "attention", "unknown", "good"];

/** The words and signs of the levels; the sign keeps them apart without colour. */
export const LEVEL_SIGNS = {
  bad: ["✕", "Trouble"],
  attention: ["!", "Needs attention"],
  unknown: ["?", "Unknown"],
  good: ["✓", "Good"],
};

/**
 * @param {object} deployment as REST returns it
 * @param {number} [proposals] plans that wait for approval
 * @returns {{level: string, words: string}}
 */
export function healthOf(deployment, proposals = 0) {
  const { state, reason, ranks, shape } = deployment;
  if (state === "follower") {
    const leader = deployment.leader;
    return {
      level: leader ? "unknown" : "bad",
      words: leader ? `Replica ${leader} leads it; ask that replica.` : "No replica leads it.",
    };
  }
  if (reason === "group_stopped") return { level: "unknown", words: sentence(reason) };
  const trouble = troubledRanks(deployment);
  if (ranks && shape && trouble.missing > 0) {
    const words = `${counted(trouble.missing, "rank")} of ${shape.num_ranks} not connected.`;
    return { level: "bad", words };
  }
  if (trouble.told > 0) {
    return { level: "bad", words: `${counted(trouble.told, "rank")} take no more waves.` };
  }
  if (state === "waiting_for_ranks") return { level: "bad", words: sentence(reason) };
  if (state === "recovering") return { level: "attention", words: sentence(reason) };
  const phase = deployment.active_plan?.phase;
  if (phase === "stalled") return { level: "bad", words: "The running plan cannot continue." };
  if (deployment.held) return { level: "attention", words: sentence(deployment.held_because) };
  if (deployment.dispatch_warning) {
    return { level: "attention", words: deployment.dispatch_warning };
  }
  if (proposals > 0) {
    const verb = proposals === 1 ? "waits" : "wait";
    return { level: "attention", words: `${counted(proposals, "proposal")} ${verb} for approval.` };
  }
  const decision = deployment.last_decision?.reason;
  if (decision === "plan_proposed" && state !== "migrating") {
    return { level: "attention", words: sentence(decision) };
  }
  if (!ranks || deployment.balancedness_mean === null) {
    return { level: "unknown", words: "The load is not known yet." };
  }
  if (["planner_failed", "store_unavailable", "stale_data"].includes(decision)) {
    return { level: "attention", words: sentence(decision) };
  }
  if (state === "migrating") return { level: "good", words: "A plan is being carried out." };
  return { level: "good", words: decision ? sentence(decision) : "No decision yet." };
}

/**
 * @param {object} deployment
 * @returns {{missing: number, told: number}} Ranks without a valid lease, and ranks that take no
 *   more waves.
 */
export function troubledRanks(deployment) {
  const ranks = deployment.ranks ?? [];
  const fresh = ranks.filter((rank) => rank.fresh).length;
  const expected = deployment.shape?.num_ranks ?? ranks.length;
  return { missing: expected - fresh, told: ranks.filter((rank) => rank.trouble).length };
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
 * @param {Record<string, number>} proposals waiting plans by deployment
 * @returns {object[]} Worst first; then by balance, the lowest first; then by name.
 */
export function worstFirst(deployments, proposals = {}) {
  const key = (row) => [
    LEVELS.indexOf(healthOf(row, proposals[row.deployment] ?? 0).level),
    balanceOf(row) ?? 2,
  ];
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
