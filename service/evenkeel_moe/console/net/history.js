/** The balance of a deployment over the last hour, as far as the controller keeps decisions. */

import { useEffect, useState } from "../vendor/hooks.js";
import { merge, pointOf } from "../lib/history.js";
import { deploymentPath } from "./api.js";

const SPAN_S = 3600;

/**
 * @param {import("./api.js").Api} api
 * @param {object | null} deployment as REST returns it, newest first known when null
 * @returns {import("../lib/history.js").Point[] | null} Oldest first; null before the first answer.
 *   Kept decisions are asked for once, later ones come with the deployment.
 */
export function useHistory(api, deployment) {
  const [points, setPoints] = useState(null);
  const name = deployment?.deployment ?? null;
  const readable = deployment !== null && deployment.state !== "follower";
  useEffect(() => {
    let ended = false;
    if (name === null) return undefined;
    setPoints(null);
    const path = `${deploymentPath(name)}/decisions?page_size=1000`;
    api.get(path).then(
      ({ items }) => ended || setPoints((old) => add(old, items, api.now())),
      () => ended || setPoints((old) => old ?? []),
    );
    return () => {
      ended = true;
    };
  }, [api, name]);
  const last = readable ? deployment.last_decision : null;
  useEffect(() => {
    if (last)
      setPoints((old) => old && merge(old, [pointOf(last, deployment)], api.now() - SPAN_S));
  }, [last?.at]);
  return points;
}

function add(known, decisions, now) {
  return merge(known ?? [], decisions.map((each) => pointOf(each)), now - SPAN_S);
}
