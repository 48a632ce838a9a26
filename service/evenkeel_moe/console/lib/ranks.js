/** What a deployment's ranks say about its load, and the order of the fleet. */

import { ago, isKnown } from "./format.js";

/** Levels of health from worst to best, each with a sign that keeps it apart without colour. */
export const LEVELS = {
  bad: ["✕", "Trouble"],
  attention: ["!", "Needs attention"],
  unknown: ["?", "Unknown"],
  good: ["✓", "Good"],
};

/**
 * The window of load stays after the last rank is gone.
 *
 * @param {{ranks_connected: number, newest_step_unix: number | null}} map as REST returns it
 * @param {number} now Unix seconds
 * @returns {string} How old the load is.
 */
export function reportedWords({ ranks_connected: connected, newest_step_unix: reported }, now) {
  const told = ago(reported, now);
  const known = told === "now" ? "reported just now" : `last reported ${told}`;
  const when = isKnown(reported) ? known : "it is unknown when it was last reported";
  return connected ? when : `${when}, no rank is connected`;
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
 * A rank tells the state of its wave while a plan runs or its end is made sure of, when a leader
 * asks for it. Afterwards the last state that it told says nothing about now; "idle" and "unknown"
 * never do. A rank without a connection may be dead: only its lease has not ended yet.
 *
 * @param {object} rank
 * @param {object} deployment
 * @returns {{kind: string, words: string}} The colour and the words of its badge.
 */
export function rankCondition(rank, deployment) {
  if (rank.stopped) return { kind: "warn", words: "! stopped as planned" };
  if (!rank.fresh) return { kind: "bad", words: "✕ lost" };
  if (rank.trouble) return { kind: "bad", words: "✕ takes no waves" };
  if (rank.epoch === null) return { kind: "warn", words: "? disconnected" };
  if (deployment.state === "ready" || ["idle", "unknown"].includes(rank.state))
    return { kind: "good", words: "✓ connected" };
  if (rank.state === "aborted") return { kind: "bad", words: "✕ aborted" };
  return { kind: "info", words: `✓ ${rank.state}` };
}

/**
 * @param {object[]} deployments
 * @returns {object[]} Worst first; then by balance, the lowest first; then by name.
 */
export function worstFirst(deployments) {
  const order = Object.keys(LEVELS);
  const level = (row) => order.indexOf(row.health.level);
  const balance = (row) => row.time_balance ?? row.balancedness_mean ?? 2;
  const name = (row) => row.deployment;
  return [...deployments].sort(
    (a, b) => level(a) - level(b) || balance(a) - balance(b) || (name(a) < name(b) ? -1 : 1),
  );
}
