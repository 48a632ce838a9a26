/** The balance of a deployment over the last hour, as far as the controller keeps decisions. */

import { useEffect, useMemo, useState } from "../vendor/hooks.js";
import { merge, pointOf } from "../lib/history.js";
import { deploymentPath } from "./api.js";
import { usePoll } from "./poll.js";

const SPAN_S = 3600;

/**
 * @param {import("./api.js").Api} api
 * @param {object | null} deployment as REST returns it, newest first known when null; later always
 *   the same one
 * @returns {{data: import("../lib/history.js").Point[] | null, error: Error | null}} Oldest first;
 *   null before the first answer. Kept decisions are asked for once, later ones come with the
 *   deployment.
 */
export function useHistory(api, deployment) {
  const [later, setLater] = useState([]);
  // Every replica answers this, also one that does not lead.
  const path = deployment && `${deploymentPath(deployment.deployment)}/decisions?page_size=1000`;
  const kept = usePoll(api, path, 0);
  const add = (known, points) => merge(known, points, api.now() - SPAN_S);
  const last = deployment?.state === "follower" ? null : deployment?.last_decision;
  useEffect(() => {
    if (last) setLater((old) => add(old, [pointOf(last, deployment)]));
  }, [last?.at]);
  const data = useMemo(
    () => kept.data && add(later, kept.data.items.map((each) => pointOf(each))),
    [kept.data, later],
  );
  return { data, error: kept.error };
}
