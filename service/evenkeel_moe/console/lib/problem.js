/** Errors of the API as sentences. */

/** A request that failed: a problem of the API, or no answer at all. */
export class RequestError extends Error {
  /**
   * @param {number} status HTTP status; 0 without an answer
   * @param {object | null} problem the problem details; `{waited_s}` if the time ran out
   */
  constructor(status, problem) {
    super(describe(status, problem));
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
  const detail = problem?.detail ?? `the answer has status ${status}`;
  // What is away for a while is said without the words of HTTP.
  if (problem?.title && status !== 503) return `${problem.title}: ${detail}.`;
  return `${detail.charAt(0).toUpperCase()}${detail.slice(1)}.`;
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
