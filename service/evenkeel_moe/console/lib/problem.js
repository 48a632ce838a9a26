/** Errors of the API as sentences. */

/** A request that failed: a problem of the API, or no answer at all. */
export class RequestError extends Error {
  /**
   * @param {number} status HTTP status; 0 without an answer
   * @param {object | null} problem the problem details
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
 * @param {object | null} problem the problem details
 * @returns {string} A sentence for people.
 */
export function describe(status, problem) {
  if (status === 0) return "The controller does not answer.";
  if (status === 401) return "The token is not accepted. It is wrong, or it was revoked.";
  if (problem?.reason === "not_leader") {
    return problem.leader
      ? `Replica ${problem.leader} leads this deployment, and this page talks to another replica.`
      : "No replica leads this deployment now.";
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
