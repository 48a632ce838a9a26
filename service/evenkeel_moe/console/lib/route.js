/** The page's address after `#`: which deployment and which view. */

/** The views of one deployment, in the order of the tabs. */
export const VIEWS = [
  ["why", "What the planner waits for"],
  ["plans", "Plans"],
  ["load", "Load"],
  ["capacity", "Capacity"],
  ["ranks", "Ranks"],
  ["record", "Policy and record"],
];

/**
 * @typedef {{deployment: string | null, view: string, plan: string | null}} Route
 * @param {string} hash with or without `#`
 * @returns {Route} The fleet if the address names nothing that is known.
 */
export function parseRoute(hash) {
  const parts = hash
    .replace(/^#?\/?/, "")
    .split("/")
    .filter(Boolean)
    .map(decode);
  const [kind, deployment, view, plan] = parts;
  if (kind !== "d" || !deployment) return { deployment: null, view: "fleet", plan: null };
  const known = VIEWS.some(([name]) => name === view);
  return { deployment, view: known ? view : "why", plan: view === "plans" && plan ? plan : null };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/**
 * @param {string | null} deployment null for the fleet
 * @param {string} [view]
 * @param {string} [plan]
 * @returns {string} An address with `#`.
 */
export function linkTo(deployment, view, plan) {
  if (deployment === null) return "#/";
  const parts = ["d", deployment, view, plan].filter((part) => part !== undefined);
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}
