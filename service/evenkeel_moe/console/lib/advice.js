/** The recommendation in words. It says what a cycle would do: nothing has happened. */

import { sentence } from "./reasons.js";

const WOULD = {
  auto: "would start a plan",
  propose: "would propose a plan",
  observe: "would find a plan, and in observe mode the controller starts nothing",
};

/**
 * @param {string} reason with which a cycle would end after planning
 * @param {string | null | undefined} mode of the deployment
 * @returns {string} A sentence about an algorithm.
 */
export function outcomeWords(reason, mode) {
  if (reason !== "plan_started") return sentence(reason);
  const words = WOULD[mode] ?? "would make a plan";
  return `${words[0].toUpperCase()}${words.slice(1)}.`;
}

/**
 * @param {string} reason as above
 * @param {string | null | undefined} mode of the deployment
 * @returns {string} A sentence about the deployment's own algorithm.
 */
export function adviceWords(reason, mode) {
  if (reason !== "plan_started") return sentence(reason);
  const words = WOULD[mode] ?? "would make a plan";
  return `A cycle ${words}, if the gates before planning are open.`;
}
