/** A row of the audit as what somebody asked for. */

import { duration } from "./format.js";
import { labelOf } from "./changes.js";

const GROUPS = ["thresholds", "limits"];

/** One field of a change of the policy, or of a plan that was asked for. */
function fieldWords([name, value]) {
  if (GROUPS.includes(name) && value && typeof value === "object") {
    return Object.entries(value).map(fieldWords).join(", ");
  }
  const shown = value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : value;
  return `${labelOf(name)} ${name.endsWith("_s") && value !== null ? duration(value) : shown}`;
}

function listWords(asked) {
  const words = Object.entries(asked).map(fieldWords).filter(Boolean).join(", ");
  return words ? `: ${words}` : "";
}

function planWords(asked) {
  const { dry_run: dry, approve, plan_id: id, ...options } = asked;
  const what = dry ? "Dry run of a plan" : approve ? "A plan that starts at once" : "A plan";
  return `${what}${id ? ` with the id ${id}` : ""}${listWords(options)}`;
}

/** What each request asks for: method and path within the deployment, with `*` for an id. */
const REQUESTS = {
  "POST /freeze": ({ seconds }) =>
    seconds === 0 ? "End of the freeze" : `Freeze${seconds ? ` for ${duration(seconds)}` : ""}`,
  "POST /resume": () => "Resume automatic plans",
  "POST /rollback": ({ to_epoch: epoch, to_placement: placement }) => {
    if (placement) return `Roll back to placement ${placement.slice(0, 12)}`;
    return epoch === undefined || epoch === null
      ? "Roll back the last plan"
      : `Roll back to epoch ${epoch}`;
  },
  "POST /plans": planWords,
  "POST /plans/*/approve": (_, id) => `Approve plan ${id}`,
  "POST /plans/*/cancel": (_, id) => `Reject or cancel plan ${id}`,
  "PATCH /policy": (asked) => `Change the policy${listWords(asked)}`,
  "DELETE /quarantine": () => "Reset the counts of reports that were not used",
  "DELETE ": () => "Forget the deployment",
};

/**
 * @param {object} row of the audit
 * @param {string} base path of the deployment, with `/v1/`
 * @returns {{words: string, request: string}} What was asked for, and method and path. A request
 *   that is not known, or whose content was cut, is shown as it was sent.
 */
export function auditWords({ method, path, change }, base) {
  const short = path.startsWith(base) ? path.slice(base.length) : path;
  const request = `${method} ${short}`;
  const [, id, verb] = short.match(/^\/plans\/([^/]+)\/(.*)$/) ?? [];
  const known = REQUESTS[`${method} ${id ? `/plans/*/${verb}` : short}`];
  const asked = parsed(change);
  if (!known || asked === null) {
    return { words: change ?? "", request };
  }
  return { words: known(asked, id && decodeURIComponent(id)), request };
}

/** Returns what a request asked for; null if it was cut. */
function parsed(change) {
  if (!change) return {};
  try {
    return JSON.parse(change);
  } catch {
    return null;
  }
}
