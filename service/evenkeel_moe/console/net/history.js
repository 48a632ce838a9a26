/** The balance of a deployment over the last hour, as far as the controller keeps decisions. */

import { useEffect, useMemo, useState } from "../vendor/hooks.js";
import { merge, pointOf } from "../lib/history.js";
import { deploymentPath } from "./api.js";
import { usePoll } from "./poll.js";

const SPAN_S = 3600;
const PERIOD_MS = 10_000;

/**
 * @param {import("./api.js").Api} api
 * @param {object | null} deployment as REST returns it, newest first known when null; later always
 *   the same one
 * @returns {{data: import("../lib/history.js").Point[] | null, error: Error | null}} Oldest first;
 *   null before the first answer. Later decisions come with the deployment, but for one that
 *   another replica leads: there the newest are asked for again.
 */
export function useHistory(api, deployment) {
  const [later, setLater] = useState([]);
  // Every replica answers this, also one that does not lead.
  const path = deployment && `${deploymentPath(deployment.deployment)}/decisions`;
  const isFollower = deployment?.state === "follower";
  const kept = usePoll(api, path && `${path}?page_size=1000`, 0);
  const newest = usePoll(api, isFollower ? `${path}?page_size=20` : null, PERIOD_MS);
  const add = (known, points) => merge(known, points, api.now() - SPAN_S);
  const last = isFollower ? null : deployment?.last_decision;
  useEffect(() => {
    if (last) setLater((old) => add(old, [pointOf(last, deployment)]));
  }, [last?.at]);
  useEffect(() => {
    if (newest.data) setLater((old) => add(old, newest.data.items.map((each) => pointOf(each))));
  }, [newest.data]);
  const data = useMemo(
    () => kept.data && add(later, kept.data.items.map((each) => pointOf(each))),
    [kept.data, later],
  );
  return { data, error: kept.error };
}
