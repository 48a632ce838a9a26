/** Errors of the API as sentences. */

/** Also a single controller loses its lease, if it is held up for longer than the lease lasts. */
export const NO_LEASE =
  "Neither this controller nor another replica holds the lease of this deployment. It is asked" +
  " for about once a second.";

/** A request that failed: a problem of the API, or no answer at all. */
export class RequestError extends Error {
  /**
   * @param {number} status HTTP status; 0 without an answer
   * @param {object | null} problem the problem details; `{waited_s}` if the time ran out
   * @param {string} path
   */
  constructor(status, problem, path) {
    super(describe(status, problem));
    this.status = status;
    this.problem = problem;
    this.path = path;
  }
}

/**
 * @param {number} status HTTP status; 0 without an answer
 * @param {object | null} problem as above
 * @returns {string} A sentence for people.
 */
export function describe(status, problem) {
  if (status === 0) {
    return problem
      ? `The controller has not answered within ${problem.waited_s} s. It may be busy.`
      : "The controller does not answer.";
  }
  if (status === 401) return "The token is not accepted. It is wrong, or it was revoked.";
  if (problem?.reason === "not_leader") {
    return problem.leader
      ? `Replica ${problem.leader} leads this deployment, and this page talks to another replica.`
      : NO_LEASE;
  }
  if (problem?.reason === "planner_starting") {
    return "The planner is starting. On a busy machine this takes some minutes.";
  }
  const detail = problem?.detail ?? `the answer has status ${status}`;
  const title = problem?.title;
  return title ? `${title}: ${detail}.` : `${capital(detail)}.`;
}

function capital(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/**
 * @param {string} role of the token
 * @param {"operate" | "admin"} needed
 * @returns {boolean}
 */
export function allows(role, needed) {
  const order = ["read", "operate", "admin"];
  return order.indexOf(role) >= order.indexOf(needed);
}
